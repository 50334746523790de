"""Calls of the flash_mla drop-ins that are like the checked one of their metadata: the same launches without checks."""

from dataclasses import replace

import pytest
import torch
from fake_driver import GOOD, FakeDriver, fake_cubins
from native_driver import COMPILER, NativeFakeDriver
from test_drop_in import MODULES, REFUSED, call

from dsagen.compat import decode, flash_mla
from dsagen.compat.decode import DEPLOYMENTS
from dsagen.errors import GuardError
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


def make(spec="v32_h64", driver_type=NativeFakeDriver):
    driver = driver_type(attributes_of=replace(GOOD, registers=128))
    return driver, Kernels(load_spec(spec), open_driver=lambda: driver, read=fake_cubins)


@pytest.fixture
def served():
    DEPLOYMENTS.forget()
    driver, kernels = make()
    flash_mla.use(kernels)
    yield driver, kernels
    DEPLOYMENTS.forget()


@pytest.fixture(params=MODULES)
def module(request):
    return MODULES[request.param]


@pytest.fixture
def checked(monkeypatch):
    """How often a call was checked in Python."""
    found = []
    inner = decode.decode
    for name in MODULES.values():
        monkeypatch.setattr(name, "decode", lambda *values: found.append(1) or inner(*values))
    return found


def test_the_layers_of_a_step_are_checked_once(module, served, checked):
    driver, _ = served
    given = call()
    layers = [given | {"q": torch.zeros_like(given["q"]), "k_cache": torch.zeros_like(given["k_cache"])} for _ in "123"]
    results = [module.flash_mla_with_kvcache(**layer) for layer in layers]
    assert len(checked) == 1
    for out, lse in results:
        assert (out.shape, out.dtype, lse.shape, lse.stride()) == (
            (2, 1, 64, 512),
            torch.bfloat16,
            (2, 64, 1),
            (64, 1, 64),
        )
    launches = len(driver.launches) // 3
    assert launches and len({record.block for record in driver.launches[::launches]}) == 3
    # Another step has metadata of its own.
    module.flash_mla_with_kvcache(**call())
    assert len(checked) == 2


def test_a_destination_is_written_to(module, served, checked):
    given, wide = call(), torch.zeros(2, 1, 80, 512, dtype=torch.bfloat16)
    for _ in range(2):
        out, lse = module.flash_mla_with_kvcache(**given, out=wide[:, :, :64])
        assert out.data_ptr() == wide.data_ptr() and lse.shape == (2, 64, 1)
    assert len(checked) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_named_after_a_good_call_too(module, served, name):
    driver, _ = served
    given, (change, message) = call(), REFUSED[name]
    if "tile_scheduler_metadata" not in change:
        module.flash_mla_with_kvcache(**given)
    count = len(driver.launches)
    with pytest.raises(GuardError) as error:
        module.flash_mla_with_kvcache(**given | change)
    assert str(error.value).startswith(f"[T-20] flash_mla_with_kvcache: {message}")
    assert len(driver.launches) == count


def test_another_shape_of_a_known_call_is_refused_by_its_metadata(module, served):
    one, other = call(), call(topk=128)
    for given in (one, other):
        module.flash_mla_with_kvcache(**given)
    with pytest.raises(GuardError, match="tile_scheduler_metadata: made for topk 64, this call has 128"):
        module.flash_mla_with_kvcache(**other | {"tile_scheduler_metadata": one["tile_scheduler_metadata"]})


def test_the_generations_do_not_take_each_others_calls(served, checked):
    given = call()
    for module in (*MODULES.values(), *MODULES.values()):
        module.flash_mla_with_kvcache(**given)
    assert len(checked) == 4


def test_kernels_that_are_given_later_serve_the_next_call(module, served, checked):
    given = call()
    for _ in range(2):
        module.flash_mla_with_kvcache(**given)
    driver, kernels = make()
    module.use(kernels)
    for _ in range(2):
        module.flash_mla_with_kvcache(**given)
    assert len(checked) == 2 and len(driver.launches) > 0
    DEPLOYMENTS.forget()
    with pytest.raises(GuardError, match=r"q: on cpu: expected a CUDA device"):
        module.flash_mla_with_kvcache(**given)


def test_without_a_launcher_in_c_each_call_is_checked(module, checked):
    DEPLOYMENTS.forget()
    module.use(make(driver_type=FakeDriver)[1])
    given = call()
    for _ in range(2):
        module.flash_mla_with_kvcache(**given)
    assert len(checked) == 2 and given["tile_scheduler_metadata"].known is None
    DEPLOYMENTS.forget()


def test_a_captured_call_is_checked(module, served, checked):
    driver, _ = served
    given = call()
    module.flash_mla_with_kvcache(**given)
    driver.capturing = True
    module.flash_mla_with_kvcache(**given)
    assert len(checked) == 2
