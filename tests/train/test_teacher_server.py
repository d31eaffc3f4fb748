"""Distillation from a server: what it says is compared right, and whatever is wrong with it is an error with its cause.

The server here is a real one, which answers as vLLM does from a real model; vLLM's own is in
tests/engine/test_teacher_on_vllm.py.
"""

import http.server
import itertools
import json
import math
import threading

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from resumed import assert_same_run
from support import program, randomise
from test_distillation import HINTED, batch_of, lines, loss_and_gradients, losses, make, taught  # noqa: F401
from transformers import AutoTokenizer
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from qlora_rl import ConfigConflictError, EngineBrokenError, PromptTooLongError, load_base
from qlora_rl.adapter.inspected import bare_model
from qlora_rl.adapter.load import load_adapter
from qlora_rl.engine.client import PromptLogprobs
from qlora_rl.engine.client import prompt_logprobs as client
from qlora_rl.engine.fake import FakeEngine
from qlora_rl.errors import AccessDeniedError, EngineUnsupportedError
from qlora_rl.sync.forward import evaluating
from qlora_rl.train.scoring import divergence
from qlora_rl.train.setup.linears import apply_linears
from qlora_rl.train.teacher import ServerTeacher

Live = program("benchmarks/live_memory.py").Live

KEY = "a-key-of-some-length"


class Teacher(http.server.ThreadingHTTPServer):
    """/v1/models and /v1/completions of a model, as vLLM has them.

    Attributes:
        spoil: changes an answer to /v1/completions before it is sent; or gives a status instead, None to hang up, or
            bytes that are sent as if they were packed.
        states: what the state route of a server of ours says, in turn, the last for ever; statuses among them.
        asked: the bodies that came.
    """

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer, self.asked, self.spoil = model, tokenizer, [], lambda answer: answer
        self.models = [{"id": "big", "parent": None, "max_model_len": 64}]
        self.states = [404]
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def said_of(self, prompt, top_k):
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        with torch.no_grad(), evaluating(self.model):
            model = bare_model(self.model)
            hidden_TH = model.base_model(torch.tensor([ids])).last_hidden_state[0]
            logprobs_TV = (hidden_TH.float() @ model.get_output_embeddings().weight.float().t()).log_softmax(-1)
        places = [None]
        for token, row in zip(ids[1:], logprobs_TV, strict=False):
            named = [token, *row.topk(top_k).indices.tolist()]
            places.append({str(each): {"logprob": row[each].item(), "rank": 1} for each in named})
        return places

    def answer(self, body):
        choices = [
            {"index": i, "prompt_logprobs": self.said_of(prompt, body["prompt_logprobs"])}
            for i, prompt in enumerate(body["prompt"])
        ]
        return {"choices": choices}


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/v1/models":
            return self.reply(200, {"data": self.server.models})
        state, *others = self.server.states
        self.server.states = others or [state]
        self.reply(*((state, {}) if isinstance(state, int) else (200, state)))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((body, self.headers.get("authorization")))
        found = self.server.spoil(self.server.answer(body))
        if found is not None:
            self.reply(*((found, {"error": {"message": "no"}}) if isinstance(found, int) else (200, found)))

    def reply(self, status, content):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("x-qlora-start", "one")
        if body is content:
            self.send_header("content-encoding", "gzip")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def a_teacher(base, taught):  # noqa: F811
    model = load_adapter(load_base(base), taught, base=base.path)
    apply_linears(bare_model(model))
    with Teacher(model, AutoTokenizer.from_pretrained(base.path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def teacher(a_teacher, monkeypatch):
    monkeypatch.delenv("QLORA_RL_API_KEY", raising=False)
    before = vars(a_teacher).copy()
    a_teacher.asked.clear()
    yield a_teacher
    vars(a_teacher).update(before)


@pytest.fixture
def soon(monkeypatch):
    """A server that is away is given up at once."""
    monkeypatch.setattr(
        PromptLogprobs.__init__, "__kwdefaults__", PromptLogprobs.__init__.__kwdefaults__ | {"wait_s": 3.0}
    )


def after(count, wrong):
    """The first answers are right: the one that compares tokenizers, and those of the first steps."""
    left = itertools.count()
    return lambda answer: answer if next(left) < count else wrong(answer)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("temperature", "softcap", "scale"), [(1.0, None, 1.0), (0.7, 20.0, 0.5)])
def test_all_tokens_as_candidates_give_trls_divergence_and_gradients(beta, temperature, softcap, scale):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 128).requires_grad_(False)
    teacher_NH, student_NH = torch.randn(2, 30, 16) * 2
    ids_NK = torch.stack([torch.randperm(128) for _ in range(30)])
    logits_NV = head(teacher_NH) * scale
    logits_NV = (logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)) / temperature
    said_NK = logits_NV.log_softmax(-1).gather(1, ids_NK)
    own, theirs = (student_NH.clone().requires_grad_() for _ in range(2))
    found_N, entropy_N = divergence.from_candidates((own, head, softcap, scale), ids_NK, said_NK, beta, temperature, 8)
    heads = (head.weight, head.bias, teacher_NH, head.weight, head.bias)
    expected_N, of_trl_N = ChunkedDivergenceFunction.apply(
        theirs, *heads, beta, temperature, scale, softcap, scale, softcap
    )
    assert torch.allclose(found_N, expected_N, atol=1e-5)
    assert torch.allclose(entropy_N, of_trl_N, atol=1e-5)
    assert expected_N.min() > 1e-3
    gradients = [torch.autograd.grad(each.sum(), of)[0] for each, of in ((found_N, own), (expected_N, theirs))]
    assert torch.allclose(*gradients, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_server_says_what_the_same_teacher_says_in_the_process(beta, make, base, lora, taught, teacher):  # noqa: F811
    found = []
    for who in ({"teacher_adapter": taught}, {"teacher_url": teacher.url, "teacher_top_k": 128}):
        torch.manual_seed(0)
        student = get_peft_model(load_base(base), lora)
        randomise(student, 0.3)
        trainer = make({"beta": beta, "bf16": False}, model=student, peft_config=None, existing_run="overwrite", **who)
        if not found:
            inputs = batch_of(trainer)
        else:
            pairs = zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
            rows = [ids[mask.bool()].tolist() for ids, mask in pairs]
            said = trainer._server.candidates(rows, inputs["completion_ids"], inputs["completion_mask"])
            inputs |= dict(zip(("teacher_ids", "teacher_logprobs"), said, strict=True))
        found.append(loss_and_gradients(trainer, trainer.model, inputs))
    (expected, theirs), (loss, gradients) = found
    # The server reads rows without padding, which a base in bfloat16 rounds otherwise.
    assert loss == pytest.approx(expected, abs=1e-4)
    assert loss > 1e-3
    for name, gradient in gradients.items():
        assert (gradient - theirs[name]).norm() < 0.03 * theirs[name].norm(), name


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_fewer_tokens_never_say_more_and_equal_models_say_nothing(beta):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 128, bias=False).requires_grad_(False)
    hidden, other = torch.randn(2, 40, 16, dtype=torch.float32) * 3
    ids_N = torch.randint(128, (40,))

    def measured(top_k, teacher_NH):
        logprobs_NV = head(teacher_NH).log_softmax(-1)
        likely_NK = logprobs_NV.topk(top_k).indices
        ids_NK = torch.cat([ids_N[:, None], likely_NK], dim=1)
        said_NK = logprobs_NV.gather(1, ids_NK)
        said_NK[:, 1:][likely_NK == ids_N[:, None]] = -math.inf  # it stands first already
        return divergence.from_candidates((hidden, head, None, 1.0), ids_NK, said_NK, beta, 1.0, 4)[0]

    known = [measured(top_k, other) for top_k in (1, 5, 20, 128)]
    for fewer, more in itertools.pairwise(known):
        assert (fewer <= more + 1e-5).all()
        assert fewer.sum() < more.sum()
    assert all(found.min() > -1e-6 for found in known)
    assert measured(5, hidden).abs().max() < 1e-5


def test_tiles_change_nothing(monkeypatch):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 128).requires_grad_(False)
    hidden = torch.randn(50, 16, requires_grad=True)
    ids_NK = torch.stack([torch.randperm(128)[:6] for _ in range(50)])
    said_NK = torch.randn(50, 128).log_softmax(-1)[:, :6]
    found = []
    for words in (1, 32_768):
        monkeypatch.setattr(divergence, "WORDS", words)
        loss = divergence.from_candidates((hidden, head, 30.0, 2.0), ids_NK, said_NK, 0.5, 0.7, 7)[0].sum()
        found.append((loss.item(), *torch.autograd.grad(loss, hidden)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-6)


def test_logits_of_all_tokens_are_never_held():
    tokens, words, hidden_size = 4096, 32_768, 64
    head = torch.nn.Linear(hidden_size, words, bias=False).requires_grad_(False)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    ids_NK = torch.randint(words, (tokens, 21))
    said_NK = torch.full((tokens, 21), -4.0)
    with Live() as live:
        divergence.from_candidates((hidden, head, None, 1.0), ids_NK, said_NK, 0.5, 1.0, 128)[0].sum().backward()
    assert live.peak < tokens * words * 4 / 3


def test_the_student_comes_closer_through_a_server_and_the_run_says_which(make, teacher):  # noqa: F811
    teacher.models.append({"id": "small", "parent": "big"})
    trainer = make({"max_steps": 12}, teacher_url=teacher.url, teacher_top_k=8)
    trainer.train()
    found = losses(trainer)
    assert sum(found[-3:]) < 0.5 * sum(found[:3])
    assert max(line["mismatch_kl"] for line in lines(trainer)) < 1e-4
    recorded = json.loads((trainer.run.path / "config.json").read_text())["teacher"]
    assert (recorded["kind"], recorded["model"], recorded["url"]) == ("server", "big", teacher.url)
    bodies = [body for body, _ in teacher.asked]
    assert {body["model"] for body in bodies} == {"big"}
    assert all(body["prompt_logprobs"] == 8 for body in bodies[1:])
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] > 0


def test_a_server_reads_another_prompt(make, teacher):  # noqa: F811
    trainer = make({"max_steps": 1}, teacher_url=teacher.url, teacher_prompt="hinted")
    trainer.train()
    tokenizer = trainer.processing_class
    hinted = [tokenizer(row["hinted"])["input_ids"] for row in HINTED]
    (body,) = [body for body, _ in teacher.asked[1:]]
    assert all(any(ids[: len(hint)] == hint for hint in hinted) for ids in body["prompt"])


def test_a_run_with_a_server_goes_on_bit_for_bit_and_not_with_another_teacher(make, base, teacher, tmp_path):  # noqa: F811
    fields = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}

    def own():
        return FakeEngine(load_base(base), max_model_length=64)

    who = {"teacher_url": teacher.url, "teacher_top_k": 8}
    make(fields | {"output_dir": str(tmp_path / "straight")}, rollout=own(), **who).train()
    # Dies in step 5, after 4 have been answered: one request to compare, one of each step.
    teacher.spoil = after(5, lambda answer: 500)
    trainer = make(fields, rollout=own(), **who)
    with pytest.raises(EngineBrokenError, match=r"rows 0 to 3 of 4.*status=500"):
        trainer.train()
    trainer.close()
    teacher.spoil = lambda answer: answer
    before, teacher.model = teacher.model, load_base(base)
    with pytest.raises(ConfigConflictError, match=r"teacher was .*kind server.*kind server"):
        make(fields, rollout=own(), existing_run="resume", **who)
    teacher.model = before
    with pytest.raises(ConfigConflictError, match=r"top_k 8.*top_k 4"):
        make(fields, rollout=own(), existing_run="resume", **who | {"teacher_top_k": 4})
    first = iter([nudged])  # another machine rounds in another way
    teacher.spoil = lambda answer: next(first, lambda answer: answer)(answer)
    make(fields, rollout=own(), existing_run="resume", **who).train()
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def nudged(answer):
    for place in answer["choices"][0]["prompt_logprobs"][1:]:
        for entry in place.values():
            entry["logprob"] -= 0.01
    return answer


def spoilt(change):
    """A fault of the first place that is trained on."""

    def wrong(answer):
        places = answer["choices"][1]["prompt_logprobs"]
        change(answer, places)
        return answer

    return wrong


def say(value):
    def change(answer, places):
        for entry in places[-1].values():
            entry["logprob"] = value

    return spoilt(change)


WRONG = {
    "NaN": (say(math.nan), r"row 1, token \d+ .*logprob is nan"),
    "no logprob": (say(2.5), r"row 1, token \d+ .*logprob is 2.5"),
    "null": (say(None), "row 1.*holds no logprobs"),
    "more than one": (say(-0.01), "row 1.*add up to"),
    "fewer tokens": (spoilt(lambda _, places: places.pop()), r"row 1: \d+ places of \d+ came back"),
    "fewer candidates": (
        spoilt(lambda _, places: (places[-1].popitem(), places[-1].popitem())),
        "row 1.* logprobs came back",
    ),
    "an empty place": (spoilt(lambda _, places: places.append(places.pop() and None)), "row 1.*holds no logprobs"),
    "fewer rows": (spoilt(lambda answer, _: answer["choices"].pop()), "rows 0 to 3 of 4: 3 answers to 4 prompts"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_a_server_says_wrong_ends_the_run_with_its_row_and_loses_nothing(fault, make, teacher):  # noqa: F811
    wrong, message = WRONG[fault]
    teacher.spoil = after(3, wrong)
    trainer = make(
        {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}, teacher_url=teacher.url, teacher_top_k=4
    )
    with pytest.raises(EngineBrokenError, match=message):
        trainer.train()
    assert trainer.run.last_checkpoint().name == "checkpoint-2"
    assert json.loads((trainer.run.path / "summary.json").read_text())["status"] == "failed"


def test_a_connection_that_breaks_is_asked_again_and_one_that_stays_away_is_an_error(make, teacher, soon):  # noqa: F811
    breaks = iter([False, True, False, False, True])
    teacher.spoil = lambda answer: None if next(breaks, False) else answer
    make({"max_steps": 2}, teacher_url=teacher.url, teacher_top_k=4).train()
    assert len(teacher.asked) == 7  # two of them again, and after each whether it is the same teacher
    teacher.spoil = after(2, lambda answer: 503)
    trainer = make({"max_steps": 2}, teacher_url=teacher.url, teacher_top_k=4, existing_run="overwrite")
    with pytest.raises(EngineBrokenError, match=r"rows 0 to 3 of 4: .*status=503"):
        trainer.train()


def test_a_teacher_with_other_tokens_is_found(make, teacher, base, tmp_path):  # noqa: F811
    AutoTokenizer.from_pretrained(base.path).save_pretrained(tmp_path / "swapped")
    file = tmp_path / "swapped" / "tokenizer.json"
    told = json.loads(file.read_text())
    vocabulary = told["model"]["vocab"]
    one, two = "3", "4"
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(told))
    teacher.tokenizer = AutoTokenizer.from_pretrained(tmp_path / "swapped")
    with pytest.raises(ConfigConflictError, match="tokenizer"):
        make(teacher_url=teacher.url)
    assert len(teacher.asked) == 1


def test_a_teacher_with_other_special_tokens_is_found(teacher, base, tmp_path):
    own = AutoTokenizer.from_pretrained(base.path)
    own.save_pretrained(tmp_path / "swapped")
    file = tmp_path / "swapped" / "tokenizer.json"
    told = json.loads(file.read_text())
    one, two = told["added_tokens"][:2]
    one["content"], two["content"] = two["content"], one["content"]
    told["model"]["vocab"] |= {each["content"]: each["id"] for each in (one, two)}
    file.write_text(json.dumps(told))
    teacher.tokenizer = AutoTokenizer.from_pretrained(tmp_path / "swapped")
    for room in (64, 1024):
        teacher.models = [{"id": "big", "max_model_len": room}]
        with pytest.raises(ConfigConflictError, match="tokenizer"):
            ServerTeacher(PromptLogprobs(teacher.url), 4, own, len(own))


def of_server(teacher, base):
    """A ServerTeacher, and what asks it for a batch."""
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    made = ServerTeacher(PromptLogprobs(teacher.url, wait_s=3.0), 4, tokenizer, len(tokenizer))
    ids = torch.tensor([[7, 8, 9], [5, 6, 7]])
    return made, lambda: made.candidates([[5, 6], [9, 8]], ids, torch.ones_like(ids))


OURS, OTHER = {"base": "a" * 64, "digest": ""}, {"base": "b" * 64, "digest": ""}


@pytest.mark.parametrize(
    ("first", "then", "hangs_up", "is_other"),
    [
        (OURS, [404], False, True),  # a server of ours is replaced by one that is not
        (OURS, [404], False, False),
        (OURS, [503], False, True),
        (OURS, [401, OTHER], False, False),  # it was away, and comes back as another
        (OURS, [OTHER], False, False),
        (OURS, [OURS], True, False),
        (404, [404], True, True),  # one that was never ours is started again
        (404, [404], True, False),
        (404, [404], False, False),
    ],
)
def test_a_teacher_that_is_exchanged_during_a_run_is_found(first, then, hangs_up, is_other, teacher, base):
    teacher.states = [first]
    _, ask = of_server(teacher, base)
    expected = ask()
    asked = len(teacher.asked)
    teacher.states = then
    breaks = iter([hangs_up])
    teacher.spoil = lambda answer: None if next(breaks, False) else answer
    if is_other:
        teacher.model = load_base(base)
    if is_other or then[-1] == OTHER:
        with pytest.raises(ConfigConflictError, match="another model"):
            ask()
    else:
        assert torch.equal(ask()[0], expected[0])
        assert len(teacher.asked) == asked + 1 + 2 * hangs_up + (first != then[0] and not hangs_up)


def test_the_key_of_another_server_is_not_sent(teacher, monkeypatch, tmp_path):
    monkeypatch.setenv("QLORA_RL_API_KEY", KEY)
    PromptLogprobs(teacher.url).score([[5, 6]], [1], 4)
    assert teacher.asked[-1][1] is None
    (tmp_path / "empty").touch()
    with pytest.raises(AccessDeniedError, match="no key"):
        PromptLogprobs(teacher.url, api_key_file=tmp_path / "empty")


def change_all(change):
    """A fault of each place of the first row."""

    def wrong(answer):
        places = answer["choices"][0]["prompt_logprobs"]
        places[1:] = [change(place) for place in places[1:]]
        return answer

    return wrong


def each_entry(change):
    return change_all(lambda place: {token: change(entry) for token, entry in place.items()})


def index(*values):
    def wrong(answer):
        for choice, value in zip(answer["choices"], values, strict=False):
            choice["index"] = value
        return answer

    return wrong


HOSTILE = {
    "no choices": lambda answer: {},
    "choices are null": lambda answer: {"choices": None},
    "choices are a number": lambda answer: {"choices": 3},
    "a choice is null": lambda answer: {"choices": [None, None]},
    "a choice is text": lambda answer: {"choices": ["ab", "cd"]},
    "an index is null": index(None, None),
    "an index is text": index("0", "1"),
    "an index is a list": index([0], [1]),
    "indices are one": index(1, 1),
    "indices from one on": index(1, 2),
    "a place is a list": change_all(lambda place: [place]),
    "a place is null": change_all(lambda place: None),
    "a place is a number": change_all(lambda place: 1.5),
    "a token is text": change_all(lambda place: {f"the {token}": entry for token, entry in place.items()}),
    "an entry is a float": each_entry(lambda entry: entry["logprob"]),
    "a logprob is null": each_entry(lambda entry: {"logprob": None}),
    "a logprob is a list": each_entry(lambda entry: {"logprob": [-1.0]}),
    "a logprob is too long": each_entry(lambda entry: {"logprob": -(10**400)}),
    "NaN": each_entry(lambda entry: {"logprob": math.nan}),
    "it cannot be unpacked": lambda answer: b"no gzip",
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_whatever_a_server_says_is_an_error_of_ours(fault, teacher):
    served = PromptLogprobs(teacher.url, wait_s=0.3)
    teacher.spoil = HOSTILE[fault]
    with pytest.raises(EngineBrokenError, match=f"asking the teacher .*{teacher.url}"):
        served.score([[5, 6, 7], [8, 9, 5]], [1, 1], 4)
    with pytest.raises(EngineBrokenError, match=f"asking the teacher .*{teacher.url}"):
        served.read("1+2=3")


@pytest.mark.parametrize("models", [None, 3, [None], ["big"], [{}], [{"id": "a", "max_model_len": [64]}]])
def test_a_list_of_models_that_is_none_is_an_error_of_ours(models, teacher):
    teacher.models = models
    with pytest.raises(EngineUnsupportedError):
        PromptLogprobs(teacher.url)


@pytest.mark.parametrize("state", [[], None, {}, {"base": None}, {"base": 3, "digest": []}, b"no gzip"])
def test_a_state_that_is_none_says_no_digest(state, teacher):
    teacher.models = [{"id": "policy", "max_model_len": "64"}]
    served = PromptLogprobs(teacher.url)
    assert served.max_length == 64
    teacher.states = [state]
    assert served.digest() == ""


def test_logprobs_that_vllm_writes_as_minus_9999_are_minus_infinity(teacher):
    teacher.spoil = each_entry(lambda entry: {"logprob": -9999.0})
    served = PromptLogprobs(teacher.url)
    (places,) = served.score([[5, 6, 7]], [1], 4)
    assert all(logprob == -math.inf for place in places for _, logprob in place)
    assert set(served.read("1+2=3")[1]) == {-9999.0}  # which is compared, and written as JSON


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_sampled_token_that_the_teacher_rules_out_belongs_to_the_rest(beta):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 128, bias=False).requires_grad_(False)
    hidden_NH = (torch.randn(40, 16) * 3).requires_grad_()
    ids_NK = torch.stack([torch.randperm(128)[:6] for _ in range(40)])
    said_NK = torch.randn(40, 128).log_softmax(-1)[:, :6]
    said_NK[:, 0] = -math.inf
    found, expected = (
        divergence.from_candidates((hidden_NH, head, None, 1.0), ids, said, beta, 1.0, 4)[0]
        for ids, said in ((ids_NK, said_NK), (ids_NK[:, 1:], said_NK[:, 1:]))
    )
    assert torch.allclose(found, expected, atol=1e-5)
    assert found.min() > -1e-6
    gradients = [torch.autograd.grad(each.sum(), hidden_NH)[0] for each in (found, expected)]
    assert gradients[0].isfinite().all()
    assert torch.allclose(*gradients, atol=1e-5)


@pytest.mark.parametrize("token", [-3, 5000, 2**70])
def test_a_token_that_is_none_of_the_students_is_found(token, teacher, base):
    _, ask = of_server(teacher, base)
    teacher.spoil = change_all(lambda place: {str(token): place.pop(list(place)[-1]), **place})
    with pytest.raises(ConfigConflictError, match=f"token {token}"):
        ask()


def test_a_sequence_without_room_is_named(make, teacher):  # noqa: F811
    teacher.models[0]["max_model_len"] = 40
    far = Dataset.from_list([{"prompt": "1+" * 18 + "1="} for _ in range(8)])
    with pytest.raises(PromptTooLongError, match=r"row 0: prompt has 38 tokens.* 39 tokens"):
        make(teacher_url=teacher.url, train_dataset=far)
    stream = far.to_iterable_dataset()  # which nobody can read before
    trainer = make(
        {"max_steps": 1}, teacher_url=teacher.url, teacher_top_k=4, train_dataset=stream, existing_run="overwrite"
    )
    with pytest.raises(PromptTooLongError, match=r"row 0 has 4\d tokens"):
        trainer.train()


@pytest.mark.parametrize(
    ("fields", "arguments", "answer", "error", "named"),
    [
        ({}, {"teacher_adapter": "none"}, None, ConfigConflictError, "one teacher"),
        (
            {"temperature": 0.7},
            {"teacher_top_k": 0},
            None,
            ConfigConflictError,
            "teacher_top_k=0",
        ),
        ({}, {"teacher_model": "other"}, None, ConfigConflictError, "teacher_model='other'"),
        ({}, {"teacher_url": "http://127.0.0.1:9"}, None, EngineBrokenError, "stayed away"),
        ({}, {}, {"choices": [{"index": 0}]}, EngineUnsupportedError, "prompt_logprobs"),
        ({}, {}, 400, ConfigConflictError, "--max-logprobs"),
        ({}, {}, 401, AccessDeniedError, "teacher_key_file"),
        (
            {},
            {"teacher_url": None, "teacher_adapter": "none", "teacher_top_k": 5},
            None,
            ConfigConflictError,
            "teacher_url",
        ),
        (
            {},
            {"teacher_url": None, "teacher_adapter": "none", "teacher_key_file": "key"},
            None,
            ConfigConflictError,
            "teacher_url",
        ),
    ],
)
def test_what_is_no_teacher_is_rejected_before_the_start(make, teacher, soon, fields, arguments, answer, error, named):  # noqa: F811
    if answer:
        teacher.spoil = lambda _: answer
    with pytest.raises(error, match=named):
        make(fields, **{"teacher_url": teacher.url, "teacher_prompt": "hinted"} | arguments)


def test_the_key_of_a_file_is_sent(make, teacher, tmp_path):  # noqa: F811
    (tmp_path / "key").write_text(KEY)
    make(teacher_url=teacher.url, teacher_key_file=tmp_path / "key")
    assert teacher.asked[-1][1] == f"Bearer {KEY}"


def test_long_batches_are_asked_for_in_parts(teacher, monkeypatch):
    monkeypatch.setattr(client, "_TOKENS", 10)
    sequences = [[5, 6, 7, 8], [6, 7, 8, 9, 10], [7, 8], [9] * 12, [5, 6]]
    found = PromptLogprobs(teacher.url).score(sequences, [2, 3, 1, 11, 1], 3)
    assert [len(body["prompt"]) for body, _ in teacher.asked] == [2, 1, 1, 1]
    assert [[place[0][0] for place in row] for row in found] == [[7, 8], [9, 10], [8], [9], [6]]
    assert all(len(place) in (4, 3 + 1) and place[1][1] >= place[2][1] for row in found for place in row)
