# Guardian: the web process, the workers and beat, by one image. docker-compose.yml says which command each has.

FROM python:3.13-slim AS packages
WORKDIR /build
COPY requirements-production.lock requirements-build.lock ./
RUN python -m venv /packages
RUN /packages/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r requirements-production.lock
# The build backend stays in this stage.
RUN pip install --no-cache-dir --require-hashes --only-binary :all: -r requirements-build.lock
COPY packages packages
RUN pip wheel --no-index --no-deps --no-build-isolation --wheel-dir wheels packages/*
RUN /packages/bin/pip install --no-index --no-deps wheels/*.whl

FROM python:3.13-slim
RUN useradd --system --uid 999 --create-home --home-dir /var/lib/guardian guardian
COPY --from=packages /packages /packages
WORKDIR /guardian
COPY . .
RUN rm -r packages && /packages/bin/python -m compileall -q /guardian

# The code belongs to root: what runs may write under /var/lib/guardian and nowhere else.
USER guardian
ENV PATH=/packages/bin:$PATH PYTHONUNBUFFERED=1 GUARDIAN_VAR_DIR=/var/lib/guardian
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["python", "deploy/healthcheck.py"]
CMD ["gunicorn", "guardian_site.wsgi", "--bind", "0.0.0.0:8000", "--worker-class", "gthread", "--threads", "8", "--no-control-socket"]
