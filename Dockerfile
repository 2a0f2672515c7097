# Guardian: the web process, the worker and beat, by one image.
FROM python:3.13-slim

RUN useradd --create-home guardian
WORKDIR /guardian
COPY requirements.lock .
RUN pip install --no-cache-dir --require-hashes -r requirements.lock
COPY --chown=guardian . .
RUN mkdir -p var && chown guardian var

USER guardian
ENV PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz')"]
CMD ["gunicorn", "guardian_site.wsgi", "--bind", "0.0.0.0:8000", "--worker-class", "gthread", "--threads", "4"]
