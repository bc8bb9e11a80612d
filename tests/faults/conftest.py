"""FIXTURES"""

@pytest.fixture(scope="module")
def module_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    """A Triton with a generating model of each kind and one for embeddings."""
    folder = tmp_path_factory.mktemp("triton")
    record = folder / "record.jsonl"
    repository = build_repository(folder, models=["ensemble", "vllm_model", "text_embedding"], record=record)
    server = EmbeddedTriton(model_repository=repository.path, backends=repository.backends, environment=os.environ)
    server.start()
    try:
        yield Own(server, repository, Record(record))
    finally:
        server.stop(timeout=1.0)


@pytest.fixture
def own(module_triton: Own) -> Own:
    """That Triton, running."""
    if module_triton.server.poll() is not None:
        module_triton.server.start()
    return module_triton


@pytest.fixture(scope="module", params=TRANSPORTS)
def module_service(
    request: pytest.FixtureRequest, module_triton: Own, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """The service with short timeouts, over each transport in turn."""
    arguments = [f"--{name}={value}" for name, value in QUICK.items()]
    arguments += [
        "--triton-url",
        module_triton.url(request.param),
        "--tokenizer",
        str(module_triton.repository.tokenizer),
    ]
    with serving(tmp_path_factory.mktemp("service"), *arguments) as running:
        yield running
        assert [] == running.complaints()


@pytest.fixture
def service(own: Own, module_service: Service) -> Service:
    """That service, ready."""
    until(lambda: module_service.status("/health/ready") == 200)
    return module_service


