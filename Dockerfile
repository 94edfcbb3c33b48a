# Serves OpenAI's HTTP API from a wheel that `make release` made: docs/tutorial/deployment.md.
FROM python:3.12-slim
COPY dist/triforce-*-cp312-abi3-*.whl constraints.txt /tmp/
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt /tmp/triforce-*_$(uname -m).whl
RUN useradd --uid 10001 --no-create-home triforce && install -d -m 700 -o triforce /cache
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
USER triforce
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=10m --timeout=5s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ping', timeout=4)"]
ENTRYPOINT ["triforce", "serve", "--host", "0.0.0.0"]
