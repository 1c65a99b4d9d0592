# A guard as a service:
#   demur export RUN -o guard && docker build -t guard . && docker run -p 8000:8000 -e DEMUR_TOKEN=WORD guard
FROM python:3.12-slim
RUN useradd --create-home --uid 1000 demur
WORKDIR /app
COPY requirements requirements
# The CPU build of torch is ten times smaller: docker build --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=""
ENV LOCKED="pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r"
RUN $LOCKED requirements/torch-cpu.lock || $LOCKED requirements/torch.lock
RUN $LOCKED requirements/core.lock -r requirements/serve.lock
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY demur demur
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
# The guard, and the module of its factory if it has one (mynets.py, named in DEMUR_MODULES).
COPY guard guard
COPY factor[y] factory
ENV PYTHONPATH=/app/factory
USER demur
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=3s --start-period=30s CMD \
    ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready')"]
CMD ["demur", "serve", "guard", "--host", "0.0.0.0", "--port", "8000", "--device", "cpu", \
     "--log-format", "json"]
