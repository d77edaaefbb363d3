PYTHON ?= python3
VENV ?= .venv
NOTEBOOKS ?=
DEVICE ?= cuda:0
NAME ?=
WATCH ?=
SEED ?= 0

BIN := $(VENV)/bin
READY := $(VENV)/.gdpa-kernels-installed
FBTRITON := fbtriton==3.7.4
EXECUTE := $(BIN)/python notebooks/execute.py
PYTEST := $(BIN)/python -m pytest -q -n 2

# The newest two minor versions of Triton itself, for the emulator.
UPSTREAM := 3.9.0 3.8.0

.PHONY: book docs pdf exercise test test-sweeps test-all test-processors test-nightly mutants \
  test-upstream test-tutorials test-hstu packages measure compare lint clean

# The rendered book: replay the chapters that changed, build, check the built site.
book: $(READY)
	$(EXECUTE) --mode replay
	@rm -rf book/extra/data
	@mkdir -p book/extra/data book/notes
	@cp -p notebooks/notes/*.md book/notes/
	@cp -R data/. book/extra/data/
	@rm -rf book/extra/data/partial book/extra/data/community/*/partial
	$(BIN)/python notebooks/card.py
	$(BIN)/jupyter-book build book --config "$(CURDIR)/_config.yml" --toc "$(CURDIR)/_toc.yml" \
	  --path-output book -W -n --keep-going --quiet
	$(BIN)/python notebooks/lengths.py
	$(PYTEST) tests/site
	$(BIN)/python -I tests/site/recompute.py --seed $$(date +%Y%m%d)
	@echo "The book is in book/_build/html/index.html"

# The site of the emulator, in emulator/docs/_build.
docs: $(READY)
	$(BIN)/sphinx-build -W -n --keep-going -q emulator/docs emulator/docs/_build

# The reading path as book/_build/book.pdf, from the pages that `make book` has built; needs Chromium.
pdf: $(READY)
	$(BIN)/python notebooks/pdf.py

# Write a kernel that is judged on a CPU: make exercise NAME=tiled WATCH=1; without a NAME the list.
exercise: $(READY)
	@$(BIN)/python -m exercises $(NAME) $(if $(WATCH),--watch)

# The quick tests, on the CPU: every kernel once in the emulator against fp64 and once through the
# compiler, every public behaviour, every refusal.
test: $(READY)
	$(PYTEST)

# What `make test` leaves out: every promise compiled, more calls at random, samples of the mutants.
test-sweeps: $(READY)
	$(PYTEST) --sweeps

# All that must pass before a change is merged, in order; CI runs it in parts.
test-all:
	$(MAKE) test
	$(MAKE) test-sweeps
	$(MAKE) test-processors
	$(MAKE) test-upstream
	$(MAKE) packages

# What depends on the processor, as on another: vector instructions of PyTorch and of MKL, threads.
ON_A_CPU := tests/gdpa/test_reference.py tests/block_attention/test_reference.py \
  tests/layers/test_layers.py tests/calling/test_jagged.py tests/norms tests/examples
test-processors: $(READY)
	ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(PYTEST) --threads 4 $(ON_A_CPU)

# What takes too long for a change: every kernel for every GPU, all mutants, many more random calls,
# others by SEED.
test-nightly: $(READY)
	$(PYTEST) --nightly --seed $(SEED)

# Every mutant of every kernel; the sweeps have a fixed sample, the nightly tests all of them too.
mutants: $(READY)
	$(PYTEST) --nightly -k all_mutants

# The emulator's tests without TLX under Triton itself, which stands before fbtriton on the path.
test-upstream: $(READY) $(UPSTREAM:%=$(VENV)/upstream/%/triton)
	for version in $(UPSTREAM); do \
	  PYTHONPATH=$(VENV)/upstream/$$version $(PYTEST) emulator/tests -m "not tlx" || exit; done

# Triton's tutorials and triton_kernels of these versions, from a clone with its tags: make
# test-tutorials TRITON=../triton. Of the files in COVERAGE's tables each must end as there.
test-tutorials: $(READY) $(UPSTREAM:%=$(VENV)/upstream/%/triton)
	$(if $(TRITON),,@echo "skipped: TRITON must be a clone of triton-lang/triton")
	$(if $(TRITON),for version in $(UPSTREAM); do PYTHONPATH=$(VENV)/upstream/$$version $(BIN)/python \
	  emulator/tutorials.py $(TRITON) v$$version --known emulator/COVERAGE.md || exit; done)

# HSTU's layers and functions of public code, from clones, beside ours, and what is recorded of them:
# make test-hstu HSTU="../generative-recommenders ../recsys-examples ../FBGEMM".
test-hstu: $(READY)
	$(if $(HSTU),$(BIN)/python -m tests.hstu.upstream $(HSTU),@echo "skipped: HSTU must be three clones")

$(VENV)/upstream/%/triton: $(READY)
	test -d $@ || $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps \
	  --target $(@D) triton==$*
	@touch $@

# Both packages built, installed in fresh environments with what they declare, and used there.
packages: $(READY)
	$(PYTEST) -n 0 tests/packages

# Measure on this machine's GPU and append records: make measure NOTEBOOKS="forward/results" DEVICE=cuda:0
measure: $(READY)
	$(EXECUTE) --mode measure --notebooks "$(NOTEBOOKS)" --device $(DEVICE)

# Measure without keeping records, and show this machine's GPU beside the recorded ones.
compare: $(READY)
	$(EXECUTE) --mode compare --notebooks "$(NOTEBOOKS)" --device $(DEVICE)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/names.py

# What was built, and with it what is known of chapters that did not change. The environment stays.
clean:
	rm -rf build/answers.json emulator/docs/_build book/_build book/executed book/extra book/notes

# Installed once, and again when a pin changes. With a CUDA build of torch, pip also installs triton,
# whose files are those of fbtriton; the last line puts fbtriton's back if they were overwritten.
$(READY): pyproject.toml emulator/pyproject.toml lab/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' || \
	  { echo "PYTHON must be Python 3.10 or newer, got $$($(PYTHON) --version)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check \
	  --constraint constraints.txt --editable emulator --editable . --editable 'lab[book,test,dev]'
	@$(BIN)/python -c 'import triton; raise SystemExit(not triton.__version__.endswith("+fb"))' || \
	  { echo "triton has overwritten fbtriton: installing $(FBTRITON) again"; \
	    $(BIN)/python -m pip install -qq --disable-pip-version-check \
	      --force-reinstall --no-deps $(FBTRITON); }
	@touch $@
