# `make setup` first on a machine with Python, git and make; everything else here does it by itself.

PYTHON = .venv/bin/python

# Arguments of make. These lines hide variables of the environment by the same names.
BROKER =
ONLY =
SECONDS =
SEED =
SMALL =
STORE =
WEB =
WORKERS =

# A broker that is named is used, and then none has to be installed.
RABBITMQ = $(if $(RABBITMQ_MANAGEMENT_URL),,rabbitmq-server)
# make test BROKER=4.3: on the RabbitMQ of that series, from a newer Debian.
RABBITMQ_OF_TESTS = $(if $(GUARDIAN_TEST_RABBITMQ_MANAGEMENT_URL),,rabbitmq-server) $(if $(BROKER),rabbitmq-$(BROKER))
test test-slow soak: export GUARDIAN_TEST_BROKER = $(BROKER)
FOR_TESTS = $(RABBITMQ_OF_TESTS) postgresql redis-server
FOR_SLOW_TESTS = $(FOR_TESTS) zookeeper cassandra nginx chromium site-agents production-packages

# The agents in the field, each in a virtual environment of its own: they pin what they need.
SITE_AGENTS = 1.0.5 1.0.7 1.0.8rc12

# Each has a broker and a database of its own, and waits for others for half of its time.
WORKERS_OF_TESTS = $(shell expr 2 \* $$(nproc))
IN_PARALLEL = -n $(WORKERS_OF_TESTS)

# Tests of one file may share a RabbitMQ of their own.
BY_FILE = $(IN_PARALLEL) --dist loadfile

# Distributions of their own, which the project uses as installed packages.
PACKAGES = packages/guardian-consumers packages/guardian-store
PYPROJECTS = pyproject.toml $(PACKAGES:%=%/pyproject.toml)
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check

CHAOS = $(PYTHON) -m tools.chaos $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

AS_LOCK = --quiet --universal --generate-hashes --no-emit-index-url --no-annotate --no-header

# Compiled modules are kept, whatever the environment says: without them each process of the tests compiles all anew.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL = help
.PHONY: help setup demo run soak test test-slow test-containers test-all lint audit bench docs pictures lock clean \
	compose-secrets \
	rabbitmq-server postgresql redis-server zookeeper cassandra machines nginx chromium site-agents production-packages

help:
	@echo "make setup   install the requirements, with apt where allowed; does nothing if they are installed"
	@echo "make demo    show Guardian at work: a broker, real messages, real mails, line by line"
	@echo "make run     run web process, workers and beat until Ctrl-C, with a private broker if none is configured"
	@echo "             (make run WEB=2 WORKERS=2: two web processes, and two workers of each kind)"
	@echo "make soak    put Guardian under load, kill and stop its parts at random for ten minutes, and check all invariants;"
	@echo "             then the long tests"
	@echo "             (make soak SECONDS=300 SEED=7: for five minutes, with the random choices of seed 7;"
	@echo "             make soak CLUSTER=yes: with three nodes of RabbitMQ;"
	@echo "             make soak STORE=cassandra: only the message store, on three nodes of Cassandra; needs root)"
	@echo "make test    run the tests that people run while they work"
	@echo "             (make test ONLY=queues/test_brake.py: all of one file or folder, or of several;"
	@echo "             make test BROKER=4.3: on RabbitMQ 4.3, or 4.0; needs root)"
	@echo "make test-all  run all tests but the long ones: also those that kill processes or need a browser, clusters,"
	@echo "             Cassandra, agents of all versions, SQLite, RabbitMQ 4.3 or Docker"
	@echo "make test-containers  run docker-compose.yml in a real Docker, on a machine within this one; needs root"
	@echo "make lint    run ruff and mypy, and check for missing migrations"
	@echo "make audit   check the installed packages for known vulnerabilities"
	@echo "make bench   run the benchmarks (make bench ONLY=name: one of them; make bench SMALL=yes: only try them)"
	@echo "make docs    write .env.example, docs/settings.md and the packages' pages of reference from the code"
	@echo "make pictures  take the screenshots of docs/ in the running application"
	@echo "make lock    compile requirements*.lock, and the agents' in tests/site_agents, again"
	@echo "make compose-secrets  create the settings and secrets of docker-compose.yml, and say what to fill in"
	@echo "make clean   remove the virtual environments and the caches; data (var/) and .env stay"

setup: .venv/installed .env $(RABBITMQ)

demo: setup rabbitmq-server
	@$(PYTHON) -m tools.demo

run: setup
	@$(PYTHON) -m tools.run $(if $(WEB),--web $(WEB)) $(if $(WORKERS),--workers $(WORKERS))

ifdef STORE
soak: setup postgresql cassandra machines
	@$(CHAOS) --store $(STORE)
else
soak: setup $(FOR_SLOW_TESTS) machines
	@$(CHAOS) $(if $(CLUSTER),--cluster)
	@GUARDIAN_TEST_DATABASE=postgresql GUARDIAN_FUZZ_CASES=12500 GUARDIAN_FUZZ_SEED=$(SEED) $(PYTHON) -m pytest tests/queues/test_fuzz.py
	$(PYTHON) -m pytest $(BY_FILE) -m soak
endif

ifdef ONLY
test: setup $(FOR_SLOW_TESTS)
	$(PYTHON) -m pytest $(BY_FILE) -m "not soak" $(ONLY:%=tests/%)
else
test: setup $(FOR_TESTS)
	$(PYTHON) -m pytest $(IN_PARALLEL) --dist worksteal -m "not slow and not soak"
endif

test-slow: setup $(FOR_SLOW_TESTS)
	$(PYTHON) -m pytest $(BY_FILE) -m "slow and not soak and not containers"
	GUARDIAN_TEST_DATABASE=sqlite $(PYTHON) -m pytest $(BY_FILE) -m "sqlite and not soak" -k "not cassandra"
	if tools/make-rabbitmq 4.3; then GUARDIAN_TEST_BROKER=4.3 $(PYTHON) -m pytest $(BY_FILE) -m "rabbitmq and not soak"; \
	else echo "Nothing was tested on RabbitMQ 4.3, because it could not be installed."; fi

# Without root or namespaces the tests are skipped, with the reason.
test-containers: setup
	@tools/make-rabbitmq 4.3 && tools/make-docker || true
	$(PYTHON) -m pytest -p no:randomly -m containers

test-all: test test-slow test-containers

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy .
	DEBUG=true DATABASE_URL=sqlite://:memory: $(PYTHON) manage.py makemigrations --check --dry-run

audit: var/audit/installed
	@$(PYTHON) -m tools.audit

bench: setup rabbitmq-server postgresql redis-server cassandra
	$(PYTHON) -m tools.benchmarks $(if $(SMALL),--small) $(ONLY)

docs: .venv/installed
	@$(PYTHON) -m tools.pages

pictures: setup rabbitmq-server chromium
	@$(PYTHON) -m tools.pictures

lock: .venv/installed
	$(PYTHON) -m pip install --quiet --disable-pip-version-check uv
	.venv/bin/uv pip compile $(PYPROJECTS) --all-extras --group dev $(AS_LOCK) --output-file requirements.lock
	.venv/bin/uv pip compile $(PYPROJECTS) --all-extras --constraint requirements.lock $(AS_LOCK) \
		--output-file requirements-production.lock
	echo hatchling | .venv/bin/uv pip compile - --python-version 3.11 --constraint requirements.lock $(AS_LOCK) \
		--output-file requirements-build.lock
	echo pip-audit | .venv/bin/uv pip compile - --python-version 3.11 $(AS_LOCK) --output-file requirements-audit.lock
	for version in $(SITE_AGENTS); do \
		echo "waldur-site-agent==$$version" | .venv/bin/uv pip compile - --python-version 3.11 $(AS_LOCK) \
			--output-file "tests/site_agents/$$version.txt" || exit 1; \
	done

compose-secrets:
	@tools/compose-secrets

clean:
	rm -rf --one-file-system .venv var/rabbitmq-* var/docker var/audit var/site-agents var/production var/cassandra .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/installed: requirements.lock $(PACKAGES:%=%/pyproject.toml)
	@tools/make-venv
	@echo "Installing the Python packages of requirements.lock and packages/"
	@$(PYTHON) $(PIP_INSTALL) --require-hashes -r requirements.lock
	@$(PYTHON) $(PIP_INSTALL) --no-index --no-deps --no-build-isolation $(PACKAGES:%=--editable %)
	@touch $@

.env: | .venv/installed
	@umask 077 && $(PYTHON) -c 'import secrets; print("SECRET_KEY=" + secrets.token_urlsafe(50))' > $@
	@echo "Wrote .env with a new SECRET_KEY; .env.example lists what else it may say"

rabbitmq-server:
	@test -x /usr/lib/rabbitmq/bin/rabbitmq-server || tools/install-debian-packages rabbitmq-server

rabbitmq-%:
	@tools/make-rabbitmq $*

postgresql:
	@ls /usr/lib/postgresql/*/bin/initdb > /dev/null 2>&1 || tools/install-debian-packages postgresql

redis-server:
	@test -x /usr/bin/redis-server || tools/install-debian-packages redis-server

zookeeper:
	@test -e /usr/share/java/zookeeper.jar || tools/install-debian-packages zookeeper

# Shared by all clones that copy var/cassandra.
cassandra: var/cassandra/installed

var/cassandra/installed: tools/cassandra-pom.xml
	@ls /usr/lib/jvm/java-17-*/bin/java /usr/bin/mvn > /dev/null 2>&1 || \
		tools/install-debian-packages openjdk-17-jre-headless maven
	@echo "Fetching Apache Cassandra with Maven, for the tests"
	@rm -rf var/cassandra
	@mvn --batch-mode --quiet --file $< dependency:copy-dependencies -DincludeScope=runtime \
		-DoutputDirectory=$(CURDIR)/var/cassandra
	@touch $@

# For nodes with networks and clocks of their own.
machines:
	@command -v ip > /dev/null && command -v cc > /dev/null || tools/install-debian-packages iproute2 gcc libc6-dev

nginx:
	@test -x /usr/sbin/nginx || tools/install-debian-packages nginx-light

chromium:
	@test -x /usr/bin/chromium || tools/install-debian-packages chromium

site-agents: $(SITE_AGENTS:%=var/site-agents/%/installed)

var/site-agents/%/installed: tests/site_agents/%.txt | .venv/installed
	@echo "Installing waldur-site-agent $*, for the tests"
	@$(PYTHON) -m venv --clear var/site-agents/$*
	@var/site-agents/$*/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

var/audit/installed: requirements-audit.lock | .venv/installed
	@echo "Installing pip-audit"
	@$(PYTHON) -m venv --clear var/audit
	@var/audit/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

# What the Dockerfile installs, in a virtual environment of its own: nothing of the tests may be missing there.
production-packages: var/production/installed

var/production/locked: requirements-production.lock | .venv/installed
	@echo "Installing the Python packages of requirements-production.lock, for the tests"
	@$(PYTHON) -m venv --clear var/production
	@var/production/bin/python $(PIP_INSTALL) --require-hashes -r $<
	@touch $@

var/production/installed: var/production/locked $(shell find packages -type f -not -name '*.pyc')
	@rm -rf var/production/wheels
	@$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation \
		--wheel-dir var/production/wheels $(PACKAGES)
	@var/production/bin/python $(PIP_INSTALL) --no-index --no-deps --force-reinstall var/production/wheels/*.whl
	@touch $@
