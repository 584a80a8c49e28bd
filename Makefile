# `make help` lists the targets. Variables:
#   PYTHON=python3.12          the Python that .venv is made with (3.10 or newer)
#   TORCH_INDEX=URL            take torch from another wheel index, for a driver too old for the default CUDA version
#                              (for example https://download.pytorch.org/whl/cu126); `labkit doctor` says when
#   LESSONS="00 01"            the lessons that `make course` runs
#   LAB="--no-browser"         options for JupyterLab
#   RUN=runs/ID                the run that `make book` takes its outputs from
PYTHON ?= python3
TORCH_INDEX ?=
LESSONS ?=
LAB ?=
WORKERS ?= 2
RUN ?=

VENV := .venv/bin
# a Python asked for by name rebuilds .venv when it is another one; the default never throws an environment away
RECREATE := $(if $(filter command,$(origin PYTHON)),--recreate)
CHROMIUM := $(shell command -v chromium chromium-browser google-chrome google-chrome-stable 2>/dev/null | head -n 1)
.DEFAULT_GOAL := help
.PHONY: help setup course lab test test-fast test-gpu test-grading lint notebooks solutions book test-browser bench-memory bench-capstone bench-plan bench-grading bench-robustness bench-overheads bench-peers lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 26

setup: ## make .venv from requirements.lock; once, and nothing when nothing changed
	@"$(PYTHON)" tools/setup.py $(RECREATE) $(if $(TORCH_INDEX),--torch-index "$(TORCH_INDEX)")

course: setup ## run every lesson headless on this machine, print the table, write the report (LESSONS="00 01" for some)
	@$(VENV)/labkit run $(LESSONS)

lab: setup ## copy notebooks/ to work/ once and open JupyterLab there
	@$(VENV)/python tools/workdir.py
	@cd work && ../$(VENV)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB)

test: setup lint ## everything that CI runs: lint, every test that needs no card, every notebook untouched
	@$(VENV)/labkit fetch || echo "going on without it: lessons then show reference rows instead"
	LABKIT_RUN="$(CURDIR)/runs/nbmake" $(VENV)/python -m pytest -n $(WORKERS) -m "not grading" --nbmake --nbmake-timeout=600 tests notebooks
	@$(if $(CHROMIUM),$(MAKE) --no-print-directory test-browser,echo "no Chromium here: the tests in a browser are left out")

test-fast: setup ## the quick tests, under 3 minutes
	$(VENV)/python -m pytest -n $(WORKERS) -m "not slow and not grading" tests

test-gpu: setup ## the tests that need a card, and every notebook on it
	$(VENV)/python -m pytest -m gpu tests
	LABKIT_RUN="$(CURDIR)/runs/nbmake" $(VENV)/python -m pytest --nbmake --nbmake-timeout=1200 notebooks

test-grading: setup ## grading: every attack and every answer, in sandboxes (Linux, bubblewrap, Chromium; about 20 minutes)
	@command -v bwrap >/dev/null || { echo "the sandbox needs bubblewrap: apt install bubblewrap" >&2; exit 1; }
	$(VENV)/python -m pytest -n $(WORKERS) -m grading tests

test-browser: setup ## a lesson in JupyterLab and the book, in a headless Chromium (apt install chromium)
	@test -n "$(CHROMIUM)" || { echo "there is no Chromium: apt install chromium" >&2; exit 1; }
	$(VENV)/python -m pytest tests/in_browser.py

lint: setup ## ruff (style and format) and mypy (types)
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy

notebooks: setup ## make notebooks/ from lessons/
	@$(VENV)/python -m labkit.notebooks build

solutions: setup ## make and run the solved notebooks
	@$(VENV)/python -m labkit.notebooks solutions

book: setup ## the course as a static site in book/, to read without Jupyter (RUN=runs/ID for the outputs of that run)
	@$(VENV)/python tools/book.py $(if $(RUN),--run "$(RUN)")

bench-memory: setup ## prediction against measurement, as tables
	@$(VENV)/python bench/memory.py

bench-capstone: setup ## lesson 12 on a card: the ablation of GPT-2 XL, trainings, the case study, the orders
	@$(VENV)/python bench/capstone.py measure
	@$(VENV)/python bench/capstone_training.py train
	@$(VENV)/python bench/capstone_case.py cost
	@$(VENV)/python bench/capstone_case.py quality
	@$(VENV)/python bench/capstone_orders.py

bench-grading: setup ## how long grading takes: up to 60 hand-ins, one and two jobs (Linux, bubblewrap; about 20 minutes)
	$(VENV)/python bench/grading.py

bench-robustness: setup ## kills, full disks, read-only folders, clocks, two runs at once: what a run survives (Linux; half an hour)
	@$(VENV)/python bench/robustness.py

bench-overheads: setup ## what measuring costs: the timing pass, the tracer's pass, imports, a run of the course
	@$(VENV)/python bench/overheads.py

bench-plan: setup ## the planner's picks against a measured search, as a table
	@$(VENV)/python bench/plan.py table

bench-peers: setup ## this course's recipes against Trainer, TRL, torchao, DeepSpeed, Unsloth and Liger (needs a card, alone on it)
	@$(VENV)/python bench/peers.py run
	@$(VENV)/python bench/peers.py run --losses
	@$(VENV)/python bench/peers.py table

lock: ## resolve requirements.lock again from pyproject.toml (needs uv)
	@"$(PYTHON)" tools/lock.py

clean: ## remove caches and build leftovers; .venv, work/, runs/ and data/ stay
	@rm -rf .pytest_cache .ruff_cache .mypy_cache build *.egg-info
	@find labkit tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
