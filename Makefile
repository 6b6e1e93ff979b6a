# One command per job; CI (.ci/run) runs the same stages.
PYTHON ?= python
CI = CI_WORK=build/ci bash .ci/run

EMULATED = $(PYTHON) tests/cuda_emulation/run.py

.PHONY: build test test-short test-deep lint asan cuda wheel models ci selftest bench clean
.PHONY: emulation test-cuda pycuda

build:  ## compile in place, install editable, with the tools of the extra "dev"
	$(PYTHON) -m pip install -e '.[dev]'

test:  ## the full profile
	$(PYTHON) -m pytest

test-short:  ## every test, the long ones cut short
	PAGEDCACHE_TEST_PROFILE=short $(PYTHON) -m pytest

test-deep:  ## the random tests twenty times longer
	PAGEDCACHE_TEST_PROFILE=deep $(PYTHON) -m pytest

lint:  ## ruff, cython-lint, clang-format, strict headers, mypy --strict
	$(CI) lint

asan:  ## the short profile under AddressSanitizer and UndefinedBehaviorSanitizer
	$(CI) asan

emulation:  ## the stub driver and the kernels for the CPU: build/cuda_emulation
	$(PYTHON) tests/cuda_emulation/build.py

pycuda:  ## a wheel of PyCUDA, without a driver: build/pycuda; pip install it, and cuda-core
	$(PYTHON) tools/build_pycuda.py

test-cuda:  ## the tests on CUDA, emulated; needs PyCUDA and cuda-core
	$(EMULATED) --async -- tests/cuda

cuda:  ## nvcc for every GPU, all emulated tests in every mode, faults on purpose
	$(CI) cuda

wheel:  ## sdist, wheel from the sdist, audits, the short profile against the installed wheel
	$(CI) wheel
	mkdir -p dist && cp build/ci/dist/*.tar.gz build/ci/wheelhouse/*.whl dist/

models:  ## a real model on the newest transformers, tiny ones on 4.57 too; the example
	$(CI) models

ci:  ## everything
	bash .ci/run

selftest:  ## the library judges itself on this machine
	$(PYTHON) -m pagedcache selftest

bench:  ## every area beside a copy, and beside the peers that are installed
	$(PYTHON) -m pagedcache bench -o md

clean:
	rm -rf build dist wheelhouse *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find pagedcache -name '*.so' -delete -o -name '*.c' -delete -o -name '*.html' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
