"""CUDA C++ from Python: compilation, compiler errors, checks before a launch, and launches on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftop.errors import CompilationError, LaunchError, MissingExtraError
from rooftop.launch import count_launches, cuda, nvrtc
from rooftop.launch.kernel_arguments import parameter_types, signature

pytest.importorskip("cuda.core")

SOURCE = """
template <typename T> __global__ void scale(const T* __restrict__ x, T* __restrict__ y, const int n, float factor) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = T(factor * float(x[i]));
}

extern "C" __global__ void plain(const float4* x, unsigned long long n, bool b, double d, void* any) {}

namespace filters { __global__ void none() {} }

__global__ void bounded(float* x) {
    __shared__ float kept[1024];
    kept[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = kept[1023 - threadIdx.x];
}

__global__ void hungry(float* x) {  // holds 128 values at a time
    float values[128];
    #pragma unroll
    for (int i = 0; i < 128; ++i) values[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 128; ++i) x[(127 - i) * 1024 + threadIdx.x] = values[i] * values[127 - i];
}

__global__ void reversed(const float* x, float* y, int n) {
    extern __shared__ float kept[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) kept[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = kept[n - 1 - i];
}

__global__ void outside(float* x) { x[1ll << 40] = 1.0f; }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache for each test, on disk and in memory."""
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda, "_kernels", {})
    return tmp_path / "kernels"


# ---- compiling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100"])
def test_machine_code_and_ptx_of_each_architecture(arch: str) -> None:
    kernel = cuda.compile(SOURCE, "scale<float>", arch=arch)
    assert kernel.binary.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in kernel.ptx
    assert kernel.binary.symbol in kernel.ptx
    assert kernel.binary.registers is not None
    assert 0 < kernel.binary.registers < 32
    assert kernel.binary.spill_bytes == 0


def test_signatures_are_those_of_the_source() -> None:
    def types(name: str) -> tuple[str, ...]:
        return cuda.compile(SOURCE, name, arch="sm_90").binary.types

    assert types("scale<float>") == ("const float*", "float*", "int", "float")
    assert types("scale<unsigned char>") == ("const unsigned char*", "unsigned char*", "int", "float")
    assert types("plain") == ("const float4*", "unsigned long long", "bool", "double", "void*")
    assert types("filters::none") == ()


@pytest.mark.parametrize("name", ["__half", "__nv_bfloat16"])
def test_headers_of_half_precision_are_found(name: str) -> None:
    source = f"#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n{SOURCE}"
    assert cuda.compile(source, f"scale<{name}>", arch="sm_90").binary.types[0] == f"const {name}*"


def test_options_change_the_code() -> None:
    source = "__global__ void f(float* x) { x[threadIdx.x] = WIDTH * sinf(x[threadIdx.x]); }"
    plain = cuda.compile(source, "f", arch="sm_90", defines={"WIDTH": 3})
    fast = cuda.compile(source, "f", arch="sm_90", defines={"WIDTH": 3}, fast_math=True)
    assert "sin.approx" in fast.ptx
    assert "sin.approx" not in plain.ptx
    assert "0f40E00000" in cuda.compile(source, "f", arch="sm_90", defines={"WIDTH": 7}).ptx
    few = cuda.compile(SOURCE, "hungry", arch="sm_90", max_registers=32).binary
    assert few.registers is not None
    assert few.registers <= 32
    assert few.spill_bytes


def test_shared_memory_and_registers_are_reported() -> None:
    assert cuda.compile(SOURCE, "bounded", arch="sm_90").binary.static_shared_bytes == 4096
    hungry = cuda.compile(SOURCE, "hungry", arch="sm_90")
    assert hungry.max_threads_per_block < 1024
    assert "hungry(float*) for sm_90" in repr(hungry)


def test_errors_name_the_kernel_and_the_line() -> None:
    wrong = SOURCE.replace("float(x[i])", "float(q[i])")
    line = next(n for n, text in enumerate(wrong.splitlines(), 1) if "q[i]" in text)
    with pytest.raises(
        CompilationError, match=rf'kernel scale<float> does not compile: line {line}: identifier "q"'
    ) as error:
        cuda.compile(wrong, "scale<float>", arch="sm_90")
    assert "if (i < n) y[i] = T(factor * float(q[i]));" in str(error.value)  # shown by the compiler's log


@pytest.mark.parametrize(
    ("source", "name", "error", "message"),
    [
        (SOURCE, "scael", CompilationError, "kernel scael is not in the source, whose kernels are scale, plain"),
        (SOURCE, "scale<flot>", CompilationError, 'identifier "flot" is undefined'),
        (
            "#include <cmath>\n" + SOURCE,
            "plain",
            CompilationError,
            "cmath, which is neither a CUDA header nor in NVRTC",
        ),
        ("#include <cuda_fp61.h>\n" + SOURCE, "plain", CompilationError, r"cuda_fp61\.h, which is not in .*include"),
        ("struct S { int a; }; __global__ void f(S s) {}", "f", TypeError, r"argument 1 \(S\): cannot be passed"),
        ("__global__ void f(int n, float** x) {}", "f", TypeError, r"argument 2 \(float\*\*\): no tensor has such"),
    ],
)
def test_what_does_not_compile(source: str, name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cuda.compile(source, name, arch="sm_90")


def test_missing_headers_name_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "header_folders", tuple)
    monkeypatch.setattr(nvrtc, "_header_folder", lambda library: None)
    for header, package in (("cuda_fp16.h", "nvidia-cuda-runtime"), ("cub/cub.cuh", "nvidia-cuda-cccl")):
        with pytest.raises(MissingExtraError, match=rf'kernel f includes {header}: pip install "?{package}'):
            cuda.compile(f"#include <{header}>\n__global__ void f() {{}}", "f", arch="sm_90")


def test_architectures_that_nvrtc_does_not_know() -> None:
    for arch in ("sm_42", "hopper"):
        with pytest.raises(ValueError, match=rf"compiles for .*sm_90.*; got '{arch}'"):
            cuda.compile(SOURCE, "plain", arch=arch)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"no GPU here to compile for.*arch="):
            cuda.compile(SOURCE, "plain")


def test_without_cuda_core_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(MissingExtraError, match=r'pip install "rooftop\[cuda\]"'):
        cuda.compile(SOURCE, "plain", arch="sm_90")


# ---- the cache ---------------------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that are compiled from now on."""
    compiled: list[str] = []
    real = nvrtc._compile

    def counting(source: str, name: str, options: nvrtc.Options) -> nvrtc.Binary:
        compiled.append(name)
        return real(source, name, options)

    monkeypatch.setattr(nvrtc, "_compile", counting)
    return compiled


def test_each_source_name_architecture_and_option_is_compiled_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = counted(monkeypatch)
    first = cuda.compile(SOURCE, "plain", arch="sm_90")
    assert cuda.compile(SOURCE, "plain", arch="sm_90") is first
    cuda._kernels.clear()  # the memory cache is empty, as in another process
    again = cuda.compile(SOURCE, "plain", arch="sm_90")
    assert again.binary == first.binary
    assert len(compiled) == 1
    cuda.compile(SOURCE, "plain", arch="sm_80")
    cuda.compile(SOURCE + " ", "plain", arch="sm_90")
    cuda.compile(SOURCE, "plain", arch="sm_90", defines={"A": 1})
    cuda.compile(SOURCE, "plain", arch="sm_90", fused_multiply_add=False)
    assert len(compiled) == 5 == len(list(cache.iterdir()))


def test_threads_that_compile_the_same_kernel_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, others = nvrtc.binary, list[cuda.Kernel]()

    def meanwhile(*arguments: Any) -> nvrtc.Binary:
        monkeypatch.setattr(nvrtc, "binary", compiled)
        others.append(cuda.compile(SOURCE, "plain", arch="sm_90"))
        return compiled(*arguments)

    monkeypatch.setattr(nvrtc, "binary", meanwhile)
    assert cuda.compile(SOURCE, "plain", arch="sm_90") is others[0]
    assert cuda.compile(SOURCE, "plain", arch="sm_90") is others[0]


@pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b"", lambda b: b"{}\n" + b, lambda b: b[:-1] + b"\x01"])
def test_a_damaged_file_is_compiled_again(
    damage: Callable[[bytes], bytes], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cuda.compile(SOURCE, "plain", arch="sm_90").binary
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    cuda._kernels.clear()
    compiled = counted(monkeypatch)
    assert cuda.compile(SOURCE, "plain", arch="sm_90").binary.types == first.types
    assert compiled == ["plain"]
    assert len(file.read_bytes()) == len(whole)


def test_a_folder_that_cannot_be_written_is_said_and_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="kernel plain could not be stored in .*ROOFTOP_CACHE"):
        assert cuda.compile(SOURCE, "plain", arch="sm_90").binary.cubin


# ---- checks before a launch --------------------------------------------------------------------------------------


def test_half_a_million_threads_in_a_block_are_a_clear_error() -> None:
    kernel = cuda.compile(SOURCE, "scale<float>", arch="sm_90")
    x = torch.ones(8)
    with pytest.raises(
        ValueError, match=r"kernel scale<float>: .*500,000 threads, expected at most 1,024.*1,954 blocks of 256"
    ):
        kernel.launch(1, 500_000, x, x, 8, 2.0)


@pytest.mark.parametrize(
    ("configuration", "error", "message"),
    [
        ({"block": (8, 8, 17)}, ValueError, "has 1,088 threads"),
        ({"block": (1, 1, 65)}, ValueError, "65 in z, expected at most 64"),
        ({"block": 0}, ValueError, "block must be at least 1"),
        ({"block": [32]}, TypeError, "block must be an int or a tuple of one to three ints"),
        ({"block": 1.5}, TypeError, "block must be an int or a tuple of one to three ints"),
        ({"grid": (1, 65_536)}, ValueError, "65,536 in y, expected at most 65,535"),
        ({"grid": 2**31}, ValueError, "in x, expected at most 2,147,483,647"),
        ({"grid": -1}, ValueError, "grid must be at least 0"),
        ({"grid": (1, 1, 1, 1)}, TypeError, "grid must be an int or a tuple of one to three ints"),
        ({"shared_bytes": 228 * 1024}, ValueError, r"0 \+ 233,472 bytes .* sm_90 has 232,448"),
        ({"shared_bytes": -1}, ValueError, "must not be negative"),
        ({"grid": 9, "cluster": 2}, ValueError, "not a multiple of the cluster"),
        ({"grid": 32, "cluster": 32}, ValueError, "more than 16 blocks"),
    ],
)
def test_configurations_that_no_gpu_can_launch(
    configuration: dict[str, Any], error: type[Exception], message: str
) -> None:
    kernel = cuda.compile(SOURCE, "scale<float>", arch="sm_90")
    with pytest.raises(error, match=message):
        kernel.check(**{"grid": 1, "block": 32} | configuration)


@pytest.mark.parametrize("name", ["grid", "block", "cluster", "shared_bytes"])
def test_a_launch_names_the_list_in_its_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "first_device", lambda arguments: 0)
    kernel = cuda.compile(SOURCE, "filters::none", arch="sm_90")
    with pytest.raises(TypeError, match=rf"{name} must be an int.*got \[2\]"):
        kernel.launch(**{"grid": 4, "block": 32} | {name: [2]})  # type: ignore[arg-type]


def test_limits_depend_on_the_kernel_and_the_architecture() -> None:
    static = cuda.compile(SOURCE, "bounded", arch="sm_80")
    with pytest.raises(ValueError, match=r"4,096 \+ 163,000 bytes .* sm_80 has 166,912"):
        static.check(1, 32, shared_bytes=163_000)
    with pytest.raises(ValueError, match="clusters need sm_90"):
        static.check(8, 32, cluster=2)
    hungry = cuda.compile(SOURCE, "hungry", arch="sm_90")
    with pytest.raises(ValueError, match=rf"expected at most {hungry.max_threads_per_block} with \d+ registers each"):
        hungry.check(1, 1024)
    assert hungry.check((3, 4), hungry.max_threads_per_block) == (3, 4, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, None, 1), TypeError, r"takes 4 arguments \(const float\*, float\*, int, float\), got 3"),
        (
            (torch.ones(4).half(), None, 1, 1.0),
            TypeError,
            r"argument 1 \(const float\*\): .*torch.float32, got torch.float16",
        ),
        (([1.0], None, 1, 1.0), TypeError, "expected a tensor or None, got list"),
        ((None, None, 2**31, 1.0), ValueError, r"argument 3 \(int\): 2,147,483,648 is outside of"),
        ((None, None, 1.0, 1.0), TypeError, "expected an integer, got 1.0"),
        ((None, None, torch.tensor(1), 1.0), TypeError, "got a tensor: use a pointer parameter,"),
        ((None, None, 1, "1"), TypeError, "expected a number, got '1'"),
        ((None, None, 1, -1e39), ValueError, "beyond the largest value"),
        ((None, None, 1, 10**400), ValueError, r"argument 4 \(float\): the integer is beyond the largest value"),
        ((torch.ones(4).to_sparse(), None, 1, 1.0), TypeError, r"argument 1 .* dense tensor, got layout .*sparse"),
    ],
)
def test_arguments_that_do_not_fit(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    kernel = cuda.compile(SOURCE, "scale<float>", arch="sm_90")
    with pytest.raises(error, match=message):
        kernel._signature.values(arguments, -1)


def test_what_is_no_text_or_no_number() -> None:
    with pytest.raises(TypeError, match="compile: source must be a str, got bytes"):
        cuda.compile(SOURCE.encode(), "reversed", arch="sm_90")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="compile: name must be a str, got NoneType"):
        cuda.compile(SOURCE, None, arch="sm_90")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"kernel reversed: shared_bytes must be an int, got 1\.5"):
        cuda.compile(SOURCE, "reversed", arch="sm_90").check(1, 1, shared_bytes=1.5)  # type: ignore[arg-type]


def test_tensors_must_be_where_the_launch_is() -> None:
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match=rf"the tensor is on {device}, the launch on cuda:0"):
            signature("f", ("float*",)).values((torch.ones(4, device=device),), 0)


def test_vectors_need_aligned_tensors() -> None:
    x = torch.ones(9)
    vectors = signature("f", ("const float4*",))
    assert vectors.values((x,), -1) == [x.data_ptr()]
    with pytest.raises(ValueError, match=r"4 bytes off a multiple of 16.*clone"):
        vectors.values((x[1:],), -1)
    assert vectors.values((torch.ones(2, dtype=torch.complex64),), -1)
    assert signature("f", ("void*",)).values((x[1:],), -1) == [x.data_ptr() + 4]


@given(st.sampled_from(["unsigned char", "short", "int", "unsigned int", "long long", "unsigned long"]), st.data())
def test_integers_pass_exactly_in_their_range(type_: str, data: st.DataObject) -> None:
    from rooftop.launch.kernel_arguments import INTEGERS

    limits = torch.iinfo(INTEGERS[type_])
    number = data.draw(st.integers(limits.min, limits.max))
    (value,) = signature("f", (type_,)).values((number,), -1)
    assert getattr(value, "value", value) == number
    for beyond in (limits.min - 1, limits.max + 1):
        with pytest.raises(ValueError, match="is outside of"):
            signature("f", (type_,)).values((beyond,), -1)


def test_parameter_types_are_split_where_parameters_end() -> None:
    assert parameter_types("void s<void (*)(A<int, float> const*, int (*)(int, long), bool)>()") == (
        "const A<int, float>*",
        "int (*)(int, long)",
        "bool",
    )


# ---- on a GPU ----------------------------------------------------------------------------------------------------


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    y = torch.empty_like(x)
    kernel = cuda.compile(SOURCE, "scale<float>", device=x.device)
    kernel.launch(-(-x.numel() // 256), 256, x, y, x.numel(), factor)
    return y


@pytest.mark.gpu
def test_a_kernel_runs_on_the_current_stream_and_is_counted() -> None:
    x = torch.randn(1 << 20, device="cuda")
    scale(x, 1.0)  # compiling and loading take longer than the stream sleeps
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with count_launches() as launches, torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        y = scale(scale(x, 3.0), 0.5)
        assert not stream.query()  # the launches do not wait for the GPU
    stream.synchronize()
    assert torch.equal(y, 1.5 * x)
    assert launches == {"scale<float>": 2}


@pytest.mark.gpu
def test_a_launch_from_a_new_thread() -> None:
    from concurrent.futures import ThreadPoolExecutor

    x = torch.randn(1000, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(scale, x, 2.0).result(), 2 * x)


@pytest.mark.gpu
@pytest.mark.parametrize("kib", [1, 48, 100])
def test_dynamic_shared_memory(kib: int) -> None:
    n = kib * 256
    x = torch.randn(n, device="cuda")
    y = torch.empty_like(x)
    cuda.compile(SOURCE, "reversed").launch(1, 256, x, y, n, shared_bytes=4 * n)
    assert torch.equal(y, x.flip(0))


@pytest.mark.gpu
def test_a_captured_launch_replays() -> None:
    x = torch.randn(1000, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the capture loads the kernel
        y = scale(x, 2.0)
    x.fill_(4.0)
    graph.replay()
    assert torch.equal(y, torch.full_like(x, 8.0))


@pytest.mark.gpu
def test_nothing_is_launched_where_something_is_wrong() -> None:
    x = torch.randn(8, device="cuda")
    kernel = cuda.compile(SOURCE, "scale<float>")
    with count_launches() as launches:
        with pytest.raises(ValueError, match="500,000 threads"):
            kernel.launch(1, 500_000, x, x, 8, 2.0)
        with pytest.raises(ValueError, match="the tensor is on cpu, the launch on cuda:0"):
            kernel.launch(1, 32, x, x.cpu(), 8, 2.0)
        kernel.launch(0, 32, x, x, 8, 2.0)
    assert not launches
    major, minor = torch.cuda.get_device_capability()
    other = "sm_80" if (major, minor) != (8, 0) else "sm_90"
    with pytest.raises(ValueError, match=rf"compiled for {other}, but cuda:0 is sm_{major}{minor}"):
        cuda.compile(SOURCE, "scale<float>", arch=other).launch(1, 32, x, x, 8, 2.0)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_with_rooftop_sync_an_error_names_its_kernel() -> None:
    """The program runs in a separate process, because a process cannot use the GPU after such an error."""
    program = f"""
import torch
from rooftop.launch import cuda
x = torch.ones(8, device="cuda")
cuda.compile({SOURCE!r}, "scale<float>").launch(1, 8, x, x, 8, 2.0)
cuda.compile({SOURCE!r}, "outside").launch(1, 1, x)
"""
    environment = {**os.environ, "ROOFTOP_SYNC": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "LaunchError: kernel outside failed" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_launch_without_a_gpu_says_so() -> None:
    kernel = cuda.compile(SOURCE, "filters::none", arch="sm_90")
    with pytest.raises(LaunchError, match="kernel filters::none: no GPU here to launch it on"):
        kernel.launch(1, 1)
