# `make setup` first on a machine with Python, git and make; everything else here does it by itself.

PYTHON = .venv/bin/python

# A broker that is named is used, and then none has to be installed.
BROKER = $(if $(RABBITMQ_MANAGEMENT_URL),,rabbitmq-server)
TEST_BROKER = $(if $(GUARDIAN_TEST_RABBITMQ_MANAGEMENT_URL),,rabbitmq-server)

# The agents in the field, each in a virtual environment of its own: they pin what they need.
SITE_AGENTS = 1.0.5 1.0.7

AS_LOCK = --quiet --universal --generate-hashes --no-emit-index-url --no-annotate --no-header

.DEFAULT_GOAL = help
.PHONY: help setup demo run test test-on-sqlite test-on-postgresql lint bench lock clean rabbitmq-server postgresql chromium site-agents

help:
	@echo "make setup   install what is needed, here and (where allowed) by apt; a second time it does nothing"
	@echo "make demo    see it work: a broker, real messages, real mails, told line by line"
	@echo "make run     the pages, the worker and beat, until Ctrl-C; with a broker of its own if none is configured"
	@echo "make test    all tests, on SQLite and on PostgreSQL"
	@echo "make lint    ruff, mypy, and whether a migration is missing"
	@echo "make bench   measure (make bench ONLY=name: one of them)"
	@echo "make lock    compile requirements.lock and the agents' in tests/site_agents anew"
	@echo "make clean   remove the virtual environments and the caches; data (var/) and .env stay"

setup: .venv/installed .env $(BROKER)

demo: setup
	@$(PYTHON) -m local.demo

run: setup
	@$(PYTHON) -m local.run

test: setup $(TEST_BROKER) postgresql chromium site-agents
	@$(MAKE) --no-print-directory -j2 test-on-sqlite test-on-postgresql

# At once, each with a broker of its own: most of the time a test waits for somebody else.
test-on-sqlite:
	$(PYTHON) -m pytest

test-on-postgresql:
	@mkdir -p var
	@GUARDIAN_TEST_DATABASE=postgresql $(PYTHON) -m pytest -m database > var/test-on-postgresql.txt 2>&1; \
		code=$$?; echo; echo "On PostgreSQL:"; cat var/test-on-postgresql.txt; exit $$code

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy .
	DEBUG=true DATABASE_URL=sqlite://:memory: $(PYTHON) manage.py makemigrations --check --dry-run

bench: setup rabbitmq-server
	$(PYTHON) -m benchmarks $(ONLY)

lock: .venv/installed
	$(PYTHON) -m pip install --quiet --disable-pip-version-check uv
	.venv/bin/uv pip compile pyproject.toml --group dev $(AS_LOCK) --output-file requirements.lock
	for version in $(SITE_AGENTS); do \
		echo "waldur-site-agent==$$version" | .venv/bin/uv pip compile - --python-version 3.11 $(AS_LOCK) \
			--output-file "tests/site_agents/$$version.txt" || exit 1; \
	done

clean:
	rm -rf .venv var/site-agents .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/installed: requirements.lock
	@local/make-venv
	@echo "Installing the Python packages of requirements.lock"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $@

.env: | .venv/installed
	@umask 077 && $(PYTHON) -c 'import secrets; print("SECRET_KEY=" + secrets.token_urlsafe(50))' > $@
	@echo "Wrote .env with a new SECRET_KEY; .env.example lists what else it may say"

rabbitmq-server:
	@test -x /usr/lib/rabbitmq/bin/rabbitmq-server || local/install-debian-packages rabbitmq-server

postgresql:
	@ls /usr/lib/postgresql/*/bin/initdb > /dev/null 2>&1 || local/install-debian-packages postgresql

chromium:
	@test -x /usr/bin/chromium || local/install-debian-packages chromium

site-agents: $(SITE_AGENTS:%=var/site-agents/%/installed)

var/site-agents/%/installed: tests/site_agents/%.txt | .venv/installed
	@echo "Installing waldur-site-agent $*, for the tests"
	@$(PYTHON) -m venv --clear var/site-agents/$*
	@var/site-agents/$*/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@
