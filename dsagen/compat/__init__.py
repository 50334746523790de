"""Modules that stand in for those that engines import: `sys.modules["flash_mla"] = dsagen.compat.flash_mla`."""
