"""Loading: devices and archs, cubins from the store, attributes held to the plan, missing GPUs."""

import dataclasses

import pytest
from fake_driver import GOOD, FakeDriver, fake_cubins

import dsagen
from dsagen.build import Store
from dsagen.errors import BuildError, DeviceError, GuardError, SpecError, StoreError
from dsagen.limits import LOAD_GUARDS
from dsagen.runtime import driver as driver_module
from dsagen.runtime.api import Kernels
from dsagen.runtime.driver import NO_BINARY, DeviceFacts
from dsagen.runtime.loader import read_cubins
from dsagen.spec import load_spec


def make(spec="v32_h16", read=fake_cubins, device=None, archs=None, **fields):
    fake = FakeDriver(**fields)
    spec = load_spec(spec) if isinstance(spec, str) else spec
    return fake, Kernels(spec, device=device, archs=archs, open_driver=lambda: fake, read=read)


def make_on(facts):
    fake = FakeDriver(facts)
    return Kernels(load_spec("v32_h16"), open_driver=lambda: fake, read=fake_cubins)


@pytest.mark.parametrize(
    ("change", "guard_id", "said"),
    [
        ({"registers": 256}, "L-01", "256 registers a thread"),
        ({"local_bytes": 8}, "L-02", "8 B a thread in local memory"),
        ({"max_threads": 64}, "L-03", "at most 64 threads"),
        ({"static_smem_bytes": 16}, "L-04", "16 B of static shared memory"),
        ({"registers": 80}, "L-06", "exactly 96"),
    ],
)
def test_a_kernel_that_differs_from_its_plan_is_refused(change, guard_id, said):
    fake, kernels = make(attributes_of=dataclasses.replace(GOOD, **change))
    with pytest.raises(GuardError, match=rf"^\[{guard_id}\] .*{said}.*sparse_decode-main-hopper"):
        kernels.prepare()
    assert fake.smem_opt_ins == {}


def test_a_device_with_less_shared_memory_is_refused():
    kernels = make_on(DeviceFacts("small", (9, 0), 132, 99 * 1024))
    with pytest.raises(GuardError, match=r"^\[L-05\] kernel needs \d+ B of shared memory, .* a block 101376 B"):
        kernels.prepare()


def test_every_load_guard_is_tripped_above():
    assert [guard.guard_id for guard in LOAD_GUARDS] == ["L-01", "L-02", "L-03", "L-04", "L-05", "L-06"]


def test_an_arch_that_the_spec_does_not_declare_names_both_sides():
    with pytest.raises(
        DeviceError, match=r"v32_h16 is for sm_90a, device 0 \(B200\) is sm_100a: add sm_100a to `archs`"
    ):
        make_on(DeviceFacts("B200", (10, 0), 148, 227 * 1024))
    with pytest.raises(DeviceError, match=r"device 0 \(old\): no arch for compute capability 7.0: known are sm_80"):
        make_on(DeviceFacts("old", (7, 0), 80, 96 * 1024))


def test_archs_narrow_what_is_loaded():
    spec = load_spec("v32_h16").replace(archs=["sm_90a", "sm_80"])
    fake = FakeDriver()
    with pytest.raises(DeviceError, match=r"is for sm_80, device 0 \(fake H200\) is sm_90a"):
        Kernels(spec, archs=["sm_80"], open_driver=lambda: fake, read=fake_cubins)
    kernels = Kernels(spec, open_driver=lambda: fake, read=fake_cubins)
    kernels.prepare()
    assert len(fake.loads) == 2 and all("sm_90a" in symbol for symbol in fake.loads)
    with pytest.raises(SpecError, match="sm_100a is not among its archs"):
        Kernels(spec, archs=["sm_100a"], open_driver=lambda: fake, read=fake_cubins)


def test_a_cubin_of_another_arch_says_so():
    fake, kernels = make()
    fake.load_error = NO_BINARY
    with pytest.raises(DeviceError, match=r"built for sm_90a, device 0 \(fake H200\) has compute capability 9.0"):
        kernels.prepare()


def test_any_other_load_failure_names_kernel_and_device():
    fake, kernels = make()
    fake.load_error = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(
        DeviceError, match=r"sparse_decode-main.* cannot be loaded on device 0 \(fake H200\): .*OUT_OF_MEMORY"
    ):
        kernels.prepare()


@pytest.mark.parametrize("device", [1, -1, True, "cuda:1", "gpu", "meta", 1.5])
def test_a_device_that_is_not_there_is_named(device):
    with pytest.raises(DeviceError, match=r"expected one of the 1 CUDA device\(s\)"):
        make(device=device)


@pytest.mark.parametrize("device", [None, 0, "cuda", "cpu"])
def test_ways_to_name_a_device(device):
    assert str(make(device=device)[1].device) == "cpu"


def test_a_spec_that_is_not_built_yet_is_refused_before_a_device_is_looked_for():
    def no_driver():
        raise AssertionError("the driver was opened")

    narrow = {"model": "custom", "kv": "bf16", "dims": {"d_qk": 192, "d_v": 64}, "topk": 64, "heads": 16}
    with pytest.raises(SpecError, match="not everything"):
        Kernels(
            load_spec({**narrow, "archs": ["sm_90a"], "ops": ["sparse_decode"]}),
            open_driver=no_driver,
            read=fake_cubins,
        )


def test_no_driver_is_a_device_error(monkeypatch):
    def refuse(flags):
        raise RuntimeError("libcuda.so.1 is not there\nand more")

    from cuda.bindings import driver as cuda

    monkeypatch.setattr(cuda, "cuInit", refuse)
    with pytest.raises(DeviceError) as caught:
        dsagen.load("v32_h16")
    text = str(caught.value)
    assert text.startswith(
        "no NVIDIA driver found on this machine (libcuda.so.1 is not there). `dsagen build` needs no GPU"
    )
    assert caught.value.exit_code == 5


def test_torch_without_cuda_is_a_device_error(monkeypatch):
    monkeypatch.setattr(driver_module, "_import_driver", lambda: None)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(DeviceError, match="is built without CUDA: install a CUDA build of torch"):
        dsagen.load("v32_h16")


def test_load_takes_what_load_spec_takes():
    for bad, message in (("no_such_spec", "no such file"), ({"model": "v32", "haeds": 16}, "haeds")):
        with pytest.raises(SpecError, match=message):
            dsagen.load(bad)


def test_without_jit_a_miss_names_kernel_store_and_knobs(monkeypatch, tmp_path):
    monkeypatch.setenv("DSAGEN_NO_JIT", "1")
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(StoreError) as caught:
        make(read=read_cubins)
    text = str(caught.value)
    assert all(part in text for part in ("sparse_decode-main", str(tmp_path), "DSAGEN_NO_JIT", "dsagen build"))
    assert isinstance(caught.value, BuildError)


def test_without_a_toolchain_a_miss_is_a_build_error(monkeypatch, tmp_path):
    monkeypatch.delenv("DSAGEN_NO_JIT", raising=False)
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DSAGEN_NVCC", str(tmp_path / "nvcc"))
    with pytest.raises(BuildError, match="DSAGEN_NVCC"):
        make(read=read_cubins)


def test_cubins_are_read_once():
    calls = []

    def read(plans):
        calls.append([plan.slug for plan in plans])
        return fake_cubins(plans)

    fake, kernels = make(read=read)
    kernels.prepare()
    kernels.plan_sparse_decode(1, 1, 64)
    assert len(calls) == 1 and len(calls[0]) == 2 == len(fake.loads)


def test_explain_says_what_would_run():
    fake, kernels = make()
    text = kernels.explain(batch=1)
    assert text.startswith("sparse_decode: v32_h16 on device 0 (fake H200, sm_90a, 132 SMs)")
    assert "untuned" in text and "workspace: " in text and "combine: sparse_decode-combine" in text
    assert "combine: " not in kernels.explain(batch=1, num_splits=1)
    assert fake.loads == []
    with pytest.raises(GuardError, match=r"^\[T-11\] topk: the spec v32_h16 declares ops sparse_decode"):
        kernels.explain("topk", batch=1)
    with pytest.raises(GuardError, match=r"^\[T-16\] width: nothing that a call of sparse_decode takes depends on it"):
        kernels.explain(batch=1, width=9)


@pytest.mark.parametrize("name", ["batch", "s_q", "topk", "extra_topk"])
@pytest.mark.parametrize("value", [None, "3", [], 1.0, True])
def test_sizes_of_a_plan_are_whole_numbers(name, value):
    _, kernels = make()
    sizes = {"batch": 2, "s_q": 1, "topk": 64, name: value}
    ways = [kernels.plan_sparse_decode, kernels.sparse_decode_workspace_bytes]
    # Of what may be left out None is the spec's.
    for way in ways if value is None and "topk" in name else [*ways, kernels.explain]:
        with pytest.raises(GuardError, match=rf"^\[T-12\] {name}: expected a whole number"):
            way(**sizes)


@pytest.mark.compile
def test_real_cubins_come_from_the_store(monkeypatch, tmp_path):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("DSAGEN_NO_JIT", raising=False)
    plans = make()[1]._on(0).plans
    cubins = read_cubins(plans)
    assert set(cubins) == {plan.slug for plan in plans}
    assert all(cubin.startswith(b"\x7fELF") for cubin in cubins.values())
    assert len(Store.open().entries()) == 2
    monkeypatch.setenv("DSAGEN_NO_JIT", "1")
    assert read_cubins(plans) == cubins
