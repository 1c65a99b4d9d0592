"""Models of every kind: functions, ONNX files, services, and classifiers of other packages."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC
from torch import Tensor, nn

from demur.attacks import PGD, Square, autoattack
from demur.attacks.attack_model import NoGradientError, QueryModel, checked
from demur.attacks.balls import Linf
from demur.audits import AutoAttack, audit, flags, queries
from demur.audits.image_parts import as_batch
from demur.audits.model_loading import as_model, load_model
from demur.audits.queries import HttpService, MeteredFunction, Queries
from demur.errors import BadInput
from demur.images import check_images
from demur.output import Output, as_output, prediction
from demur.rejectors import Con
from tests.conftest import Command

Array = NDArray[Any]


@pytest.fixture(scope="module", autouse=True)
def short_square() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoattack, "Square", partial(Square, queries=30))
        yield


def linear_net() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4)).eval()
    weight = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    net[1].load_state_dict({"weight": weight, "bias": -weight.sum(1) / 2})
    return net


NET = linear_net()


def images(count: int = 12) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    return x, prediction(NET(x))


def of_arrays(x: Array) -> Array:
    """Logits of the linear net, as a function of arrays that takes no tensor."""
    assert isinstance(x, np.ndarray)
    assert x.dtype == np.float32
    with torch.no_grad():
        logits: Array = NET(torch.from_numpy(x)).numpy()
    return logits


def without_times(value: Any) -> Any:
    """JSON without what differs between two runs of one audit: seconds, the command, the time."""
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if key not in ("seconds", "provenance")}
        return {key: without_times(one) for key, one in kept.items()}
    return [without_times(one) for one in value] if isinstance(value, list) else value


class TestFunctions:
    def test_a_function_of_arrays_is_audited_without_gradients(self) -> None:
        x, y = images()
        report = audit(of_arrays, x.numpy(), y.numpy(), eps=0.2, rejector=Con(), threshold=0.3)
        assert report.autoattack.clean.n == 12
        assert {*report.autoattack.seconds} == {"square", "hopskipjump", "rays"}
        assert report.autoattack.attacked.accepted_right < 12
        assert "function without gradients" in " ".join(report.warnings)
        assert "exactly zero" not in str(report)

    def test_the_same_attack_is_run_as_on_tensors(self) -> None:
        x, y = images()
        attack = Square(Linf(0.2), queries=40)
        assert torch.allclose(attack(of_arrays, x, y), attack(NET, x, y))  # type: ignore[arg-type]

    def test_a_gradient_attack_says_what_to_use_instead(self) -> None:
        with pytest.raises(NoGradientError, match="version='black-box'"):
            PGD(Linf(0.1))(of_arrays, *images())  # type: ignore[arg-type]

    def test_a_function_that_fails_in_both_forms_is_blamed_once(self) -> None:
        def broken(x: Any) -> Any:
            raise ValueError("no weights")

        with pytest.raises(BadInput, match=r"the model fails on .*no weights"):
            Square(Linf(0.1))(broken, *images())

    def test_scikit_learn(self) -> None:
        x, y = images(60)
        flat = x.flatten(1).numpy()
        for kind in (LogisticRegression(), LinearSVC()):
            forest = kind.fit(flat, y.numpy())
            with checked(as_model(forest), x, y) as (model, own, _):
                assert np.array_equal(prediction(model(own)).numpy(), forest.predict(flat))
        with pytest.raises(BadInput, match=r"are \[1, 2, 3, 4\]; fit it with labels from 0"):
            as_model(LogisticRegression().fit(flat, 1 + y.numpy()))
        with pytest.raises(BadInput, match="dict is no model"):
            audit({}, x, y)

    def test_keras_gets_its_order_of_axes(self) -> None:
        seen = []

        class Model:
            input_shape = (None, 4, 4, 3)

            def predict(self, x: Array, verbose: int) -> Array:
                seen.append(x.shape)
                return of_arrays(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))

        Model.__module__ = "keras.src.models"
        x, y = images()
        assert tuple(x.shape[1:]) == (3, 4, 4)
        with checked(as_model(Model()), x, y) as (model, own, _):
            assert torch.equal(prediction(model(own)), y)
        assert seen[-1] == (12, 4, 4, 3)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight, bias = (part.detach().numpy() for part in NET.parameters())
    nodes = [
        helper.make_node("Flatten", ["images"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w", "b"], ["logits"], transB=1),
        helper.make_node("Softmax", ["logits"], ["probabilities"]),
    ]
    ends = (
        [helper.make_tensor_value_info("images", kind, [5, 3, 4, 4])],
        [helper.make_tensor_value_info(name, kind, [5, 4]) for name in ("logits", "probabilities")],
    )
    arrays = [onnx.numpy_helper.from_array(a, n) for a, n in ((weight, "w"), (bias, "b"))]
    graph = helper.make_graph(nodes, "net", *ends, arrays)
    opset = [helper.make_opsetid("", 17)]
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


class TestOnnx:
    def test_a_fixed_batch_size_and_an_output_are_kept(self, file: Path) -> None:
        x, y = images(12)
        model = load_model(f"{file}:logits")
        with checked(model, x, y) as (own, *_):
            assert torch.allclose(own(x).logits, NET(x), atol=1e-5)

    def test_several_outputs_are_never_chosen_from_in_silence(self, file: Path) -> None:
        with pytest.raises(BadInput, match=r"2 outputs; choose the logits: .*:logits or "):
            load_model(str(file))
        with pytest.raises(BadInput, match="has no output 'other'"):
            load_model(f"{file}:other")

    def test_the_command_audits_a_file(self, file: Path, tmp_path: Path, command: Command) -> None:
        x, y = images()
        np.savez(tmp_path / "images.npz", x=x.numpy(), y=y.numpy())
        data = str(tmp_path / "images.npz")
        arguments = ("audit", f"{file}:logits", "--data", data, "--eps", "0.2", "--json")
        code, text, _ = command(*arguments)
        assert (code, json.loads(text)["n"]) == (0, 12)

    def test_what_cannot_be_read_is_said(self, tmp_path: Path) -> None:
        pytest.importorskip("onnxruntime")
        (tmp_path / "bad.onnx").write_bytes(b"nonsense")
        with pytest.raises(BadInput, match="cannot be read as ONNX"):
            load_model(str(tmp_path / "bad.onnx"))
        with pytest.raises(BadInput, match="is no file"):
            load_model("absent.onnx")


class Handler(BaseHTTPRequestHandler):
    """A service in the format of demur serve, and of another one under /other."""

    asked = 0
    busy = 0

    def do_GET(self) -> None:
        self._send({"classes": 4, "rule": [{"score": "Con", "threshold": 0.5}]})

    def do_POST(self) -> None:
        cls = type(self)
        if cls.busy:
            cls.busy -= 1
            self.send_error(503)
            return
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        given = document["images"] if self.path == "/predict" else document["inputs"]
        x = np.asarray(given, np.float32)
        x = x.transpose(0, 3, 1, 2) if self.path == "/predict" else x
        cls.asked += len(x)
        logits = torch.from_numpy(of_arrays(np.ascontiguousarray(x)))
        if self.path != "/predict":
            self._send({"outputs": logits.tolist()})
            return
        top = logits.softmax(1).max(1)
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        answers = [
            {"label": a, "confidence": b, "scores": {"Con": b}, "accepted": b >= 0.5}
            for a, b in rows
        ]
        self._send({"predictions": answers})

    def _send(self, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: Any) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    Handler.asked = Handler.busy = 0
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def other_format(x: Array, send: Any) -> Any:
    return send({"inputs": x.tolist()})["outputs"]


class TestServices:
    def test_the_service_of_demur_tells_labels_and_confidence(self, address: str) -> None:
        x, y = images()
        Handler.busy = 1  # it is asked again
        answers = HttpService(address)(x.numpy())
        logits, rejected = answers[:, :-1], answers[:, -1] > answers[:, :-1].max(1)
        exact = torch.from_numpy(of_arrays(x.numpy())).softmax(1).amax(1)
        assert np.array_equal(logits.argmax(1), y.numpy())
        assert np.allclose(np.exp(logits).max(1), exact.numpy(), atol=1e-5)
        assert np.allclose(np.exp(logits).sum(1), 1, atol=1e-4)
        assert np.array_equal(rejected, exact.numpy() < 0.5)

    def test_an_adapter_speaks_another_format(self, address: str) -> None:
        x, y = images()
        model = load_model(f"{address}/other", adapter="tests.test_model_loading:other_format")
        with checked(model, x, y) as (own, *_):
            assert torch.allclose(own(x).logits, torch.from_numpy(of_arrays(x.numpy())))

    def test_the_command_resumes_after_its_budget_without_asking_twice(
        self, address: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(autoattack.VERSIONS, "black-box", (("square", 1),))
        monkeypatch.setattr(autoattack, "decision_attacks", lambda *given: {})
        for name, number in {"REPEATS": 4, "BISECTIONS": 2, "FINER": 3, "RAY_POINTS": 5}.items():
            monkeypatch.setattr(flags, name, number)
        x, y = images(6)
        np.savez(tmp_path / "images.npz", x=x.numpy(), y=y.numpy())
        common = (
            "audit", address, "--data", str(tmp_path / "images.npz"), "--eps", "0.02", "--json",
            "--state",
        )  # fmt: skip
        code, _, said = command(*common, str(tmp_path / "a"), "--budget", "90")
        assert code == 2
        assert "the budget of 90 queries is spent; the same command" in said
        assert 60 < Handler.asked <= 90
        reports, asked = [], list[int]()
        for name in ("a", "b"):
            report = json.loads(command(*common, str(tmp_path / name))[1])
            reports.append(without_times(report))
            asked.append(Handler.asked - sum(asked))
        assert reports[0] == reports[1]
        assert asked[0] == asked[1]  # of both runs with the first log

    def test_what_cannot_be_reached_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(queries, "TRIES", 1)
        with pytest.raises(BadInput, match="check the address, the service"):
            audit("http://127.0.0.1:9", *images())
        with pytest.raises(BadInput, match="--adapter is for a service"):
            load_model("tests.test_model_loading:of_arrays", adapter="a:b")


class TestQueries:
    def test_the_rate_is_kept(self) -> None:
        slow = MeteredFunction(of_arrays, "f", Queries(per_second=100.0))
        x, started = images()[0].numpy(), time.monotonic()
        for _ in range(3):
            slow(x)
        assert time.monotonic() - started >= 0.24

    def test_a_killed_run_goes_on_from_its_log(self, tmp_path: Path) -> None:
        log, asked = str(tmp_path / "queries.db"), list[int]()
        x = np.arange(200, dtype=np.float32).reshape(100, 2, 1, 1)

        def function(x: Array) -> Array:
            asked.append(len(x))
            return x[:, :, 0, 0]

        def killed() -> None:
            MeteredFunction(function, "f", Queries(log=log))(x[:70])
            os.kill(os.getpid(), signal.SIGKILL)

        child = multiprocessing.get_context("fork").Process(target=killed)
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        resumed = MeteredFunction(function, "f", Queries(log=log))
        assert np.array_equal(resumed(x), x[:, :, 0, 0])
        assert sum(asked) == 30
        with pytest.raises(BadInput, match="holds answers of f"):
            MeteredFunction(function, "g", Queries(log=log))

    def test_a_random_model_stays_random(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        log = Queries(log=str(tmp_path / "q.db"))
        x = np.ones((2, 1, 1, 1), np.float32)
        first = MeteredFunction(lambda x: rng.random((len(x), 3)), "f", log)
        answers = [first(x), first(x)]
        assert not np.array_equal(answers[0], answers[1])
        again = MeteredFunction(lambda x: rng.random((len(x), 3)), "f", log)
        assert np.array_equal(again(x), answers[0])
        assert np.array_equal(again(x), answers[1])


class TestPackages:
    def test_a_missing_package_is_named_with_its_pip_line(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        save_file({"w": torch.zeros(1)}, tmp_path / "w.safetensors")
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "net.onnx").touch()
        texts = {
            "timm": "timm:vit", "transformers": f"transformers:{tmp_path}",
            "onnxruntime": str(tmp_path / "net.onnx"),
        }  # fmt: skip
        for package, text in texts.items():
            monkeypatch.setitem(sys.modules, package, None)
            weights = tmp_path / "w.safetensors" if package == "timm" else None
            with pytest.raises(BadInput, match=f"install it with pip install .*{package[:4]}"):
                load_model(text, weights)

    def test_transformers_classifiers_get_their_normalisation(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.ViTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            image_size=8, patch_size=4, num_labels=3,
        )  # fmt: skip
        net = transformers.ViTForImageClassification(config).eval()
        net.save_pretrained(tmp_path)
        settings = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
        model, x = load_model(f"transformers:{tmp_path}"), torch.rand(2, 3, 8, 8)
        expected = net((x - 0.5) / 0.25).logits
        assert torch.allclose(as_output(model(x)).logits, expected, atol=1e-5)
        AutoAttack(model, eps=0.1, verbose=False, version="custom", attacks_to_run=["apgd-ce"])

    def test_unknown_texts_are_listed(self) -> None:
        with pytest.raises(BadInput, match="'nothing' is no model; write a run"):
            load_model("nothing")
        with pytest.raises(BadInput, match="a query budget is for models without gradients"):
            load_model("tests.test_model_loading:linear_net", queries=Queries(budget=3))


class TestImages:
    def test_uint8_tensors_are_uint8_arrays(self) -> None:
        x = torch.randint(0, 256, (12, 3, 4, 4), dtype=torch.uint8)
        y = torch.arange(12) % 4
        assert torch.equal(as_batch(x, y)[0], as_batch(x.numpy(), y.numpy())[0])
        net = NET
        attack = AutoAttack(
            net, eps=0.05, verbose=False, version="custom", attacks_to_run=["square"]
        )
        for part in (x, x.numpy()):
            assert attack.evaluate(part, y, sanity=False).attacked.n == 12
        assert torch.is_floating_point(attack.run_standard_evaluation(x, y))  # type: ignore[arg-type]

    def test_rounding_noise_is_clipped_and_more_is_named(self) -> None:
        x, y = images()
        x[3, 1, 2, 0] = 1 + 1e-6
        x[2, 0, 0, 0] = -1e-6
        x_adv = PGD(Linf(0.1), steps=2)(NET, x, y)
        assert 0 <= x_adv.min() <= x_adv.max() <= 1
        report = audit(NET, x, y, eps=0.1, version="fast")
        assert report.autoattack.attacked.n == 12
        x[3, 1, 2, 0] = 1.0001
        where = "image 3, channel 1, row 2, column 0 is 1.0001"
        for call in (lambda: check_images(x), lambda: audit(NET, x, y)):
            with pytest.raises(BadInput, match=where):
                call()

    def test_nan_is_named_where_it_is(self) -> None:
        x = torch.rand(4, 3, 4, 4)
        x[1, 2, 3, 0] = torch.nan
        with pytest.raises(BadInput, match="image 1, channel 2, row 3, column 0 is nan"):
            check_images(x)


class TestHeads:
    @pytest.mark.parametrize(
        "answer",
        [
            [torch.zeros(2, 4), torch.ones(2, 4)],
            (torch.zeros(2, 4), torch.zeros(2, 9), torch.zeros(2, 4)),
            (np.zeros((2, 4)), np.zeros((2, 4))),
        ],
    )
    def test_several_heads_are_never_chosen_from_in_silence(self, answer: Any) -> None:
        with pytest.raises(BadInput, match=r"outputs of shapes .* return one, as in lambda x"):
            if isinstance(answer[0], Tensor):
                as_output(answer)
            QueryModel(lambda x: answer)(torch.zeros(2, 1, 1, 1))

    def test_logits_with_features_or_an_auxiliary_output_stay_as_they_are(self) -> None:
        logits, feature, aux = torch.rand(2, 4), torch.rand(2, 9), torch.rand(2, 1)
        assert as_output((logits, feature)).feature is feature
        assert as_output((logits, aux)).aux is aux
        assert as_output(Output(logits, feature, aux)).logits is logits
        with pytest.raises(BadInput, match="not dict with main, other"):
            as_output({"main": logits, "other": logits})
