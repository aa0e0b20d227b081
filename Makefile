# Everything a fresh machine needs is done by the first target you type.
#   make demo   analyze ResNet-50 on real photographs and print where the report lies
#   make test   lint, types, import contracts, and all tests
#   make test-gpu [GPU_PYTHON=python3] [TESTS=tests/kernels]
#               the tests that need an NVIDIA GPU, on all that are here
#   make bench-kernels [MACHINE=h200] [KERNELS="softmaxes losses"]
#               time every kernel, or these, on the GPU here, into benchmarks/results/MACHINE

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/ready

# Where figures go, and the Python that has PyTorch for the GPU (any other than this one is taken as it is).
MACHINE ?= h200
GPU_PYTHON ?= $(BIN)/python
KERNELS ?= $(filter-out repeating tables,$(basename $(notdir $(wildcard benchmarks/kernels/*.py)))) rms_norms add_layer_norms add_rms_norms

TESTS ?= tests

.PHONY: setup demo test test-gpu lint format browser ffmpeg gpu bench-kernels clean

setup: $(STAMP)

PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

# torchvision must be built for the torch that is here: where it fails to load, much of transformers does too. Where the
# index has no build that fits (its builds are for CUDA), none is installed: its Python parts lie in .venv/oracles, where
# only the tests look, to compare networks with (tests/conftest.py).
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "Python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PIP) torch
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps torchvision
	@rm -rf .venv/oracles; $(BIN)/python -c 'import torchvision' 2>/dev/null || { \
		$(BIN)/pip uninstall --quiet --yes torchvision && $(PIP) --target .venv/oracles --no-deps torchvision && \
		echo "torchvision is left out: the index has no build for this torch. Tests compare networks with its Python parts; rooftop doctor says what to install."; \
	}
	@touch $@

demo: setup
	@$(BIN)/python examples/photographs.py build/photographs
	@$(BIN)/rooftop analyze resnet50 --input build/photographs -o build/report.html

# The report and the viewer are tested in a real browser. Without root and without one installed, those tests are skipped and say so.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || echo "no chromium: the browser tests will be skipped (apt-get install chromium)"

# What is said of FFmpeg is tested with a real one, in the same way.
ffmpeg:
	@command -v ffmpeg >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends ffmpeg >/dev/null; } || echo "no ffmpeg: the tests that run it will be skipped (apt-get install ffmpeg)"

# One worker more than processors, up to five: some tests wait for other processes, clocks and browsers.
test: setup browser ffmpeg lint
	$(BIN)/pytest -n $$($(BIN)/python -c 'import os; print(min(os.cpu_count(), 4) + 1)') --dist worksteal

# Kernels are compiled in many processes at once: each has one thread for what runs on the CPU.
test-gpu: gpu
	OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -m gpu -n logical --maxprocesses $$(( 14 * $$($(GPU_PYTHON) -c 'import torch; print(torch.cuda.device_count())') )) --dist worksteal $(TESTS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --num-workers 2
	$(BIN)/mypy examples/*.py
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup)
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "$(MAKECMDGOALS) needs an NVIDIA GPU, and PyTorch finds none with $(GPU_PYTHON); name another Python with: make $(MAKECMDGOALS) GPU_PYTHON=python3"; exit 1; }

# A benchmark that fails leaves the others, and fails the target at the end. Norms have a file each.
bench-kernels: gpu
	@failed=; for name in $(KERNELS); do \
		case $$name in \
			norms) script="norms.py --all-sizes";; \
			rms_norms|add_layer_norms|add_rms_norms) script="norms.py --norm $${name%s}";; \
			*) script=$$name.py;; \
		esac; \
		echo "$$name"; \
		$(GPU_PYTHON) benchmarks/kernels/$$script --out benchmarks/results/$(MACHINE)/$$name.json || failed="$$failed $$name"; \
	done; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

clean:
	rm -rf .venv build dist
