"""Parameters of a request, and the fields of its answer."""

import ast
import inspect
import math
import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from triforce.errors import RequestError
from triforce.interface.explain import TierStats
from triforce.interface.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from triforce.interface.sampling_params import SamplingParams

REFUSED: list[tuple[str, list[Any]]] = [
    ("temperature", [-0.1, math.nan, math.inf, 10**400, True, "1"]),
    ("top_p", [0, -0.1, 1.01, math.nan, True, "0.9"]),
    ("min_p", [-0.1, 1.01, math.nan, False]),
    ("top_k", [-2, 1.0, True]),
    ("repetition_penalty", [0, -1, math.nan, math.inf, 1e10]),
    ("presence_penalty", [math.nan, -math.inf, "0"]),
    ("frequency_penalty", [math.nan, 1e10]),
    ("n", [0, -1, 1.5, True]),
    ("max_tokens", [0, -1, "16", True]),
    ("seed", [-2, 2**64, 0.0, True]),
    ("stop", ["", ["a", ""], [1], 5]),
    ("stop_token_ids", [[-1], [1.0], [True], "12", 3]),
    ("ignore_eos", [1, "yes"]),
    ("logprobs", [-1, 21, 1.0, True]),
    ("prompt_logprobs", [-1, 21]),
    ("logit_bias", [{-1: 1.0}, {"1": 1.0}, {1: math.nan}, {1: -math.inf}, {1: True}, {True: 1.0}, [1.0]]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED for value in values], ids=repr)
def test_sampling_params_bad_value_raises(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as error:
        SamplingParams(**{name: value})
    assert "must be" in str(error.value) and ", not " in str(error.value)


def test_sampling_params_error_names_allowed_values() -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(temperature=-1)
    assert str(error.value) == "temperature must be a finite number, at least 0 (0 is greedy), not -1"


@pytest.mark.parametrize(
    "fields",
    [
        {
            "temperature": 0,
            "top_k": -1,
            "top_p": 1,
            "min_p": 1,
            "seed": 2**64 - 1,
            "logprobs": 20,
            "prompt_logprobs": 0,
        },
        {"temperature": np.float32(0.5), "top_k": np.int64(3), "n": np.int32(2), "logit_bias": {np.int64(1): -100}},
        {"stop": ["\n", "###"], "stop_token_ids": range(3), "ignore_eos": True, "seed": 0},
    ],
)
def test_sampling_params_good_values_are_accepted(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert pickle.loads(pickle.dumps(params)) == params


def test_sampling_params_are_normalised() -> None:
    bias = {3: 1}
    params = SamplingParams(temperature=0, top_k=-1, stop="end", stop_token_ids=[1], logit_bias=bias)
    bias[4] = 2
    assert (params.temperature, params.top_k, params.stop, params.stop_token_ids) == (0.0, 0, ("end",), (1,))
    assert params.logit_bias == {3: 1.0} and type(params.temperature) is float
    assert SamplingParams(seed=-1).seed is None


def test_sampling_params_seed_of_minus_one_is_drawn() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()


def test_sampling_params_errors_name_the_parameter() -> None:
    for name, value in (("top_p", 0), ("logit_bias", {-1: 0}), ("logit_bias", {5: "x"}), ("stop", 5), ("n", 0)):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert set(caught.value.arguments) == {name}


def test_sampling_params_are_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]


def test_outputs_count_tokens_and_tiers() -> None:
    tier = TierStats("full", proposed=8, accepted=6)
    assert tier.acceptance == 0.75 and TierStats("full").acceptance is None

    def output(index: int) -> CompletionOutput:
        logprobs = [TokenLogprobs(Logprob(7, -0.5))] * 3
        return CompletionOutput(index, "abc", [7, 7, 7], "length", logprobs, ["full"] * 3, 1, [tier])

    answer = RequestOutput([1, 2], None, [output(0), output(1)], "ar", "seeded", "bitwise", 1.0, 0.5)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.tokens_per_second) == (2, 6, 12.0)
    instant = RequestOutput([1], None, [], "ar", "seeded", "bitwise", 0.0, 0.0)
    assert instant.tokens_per_second == 0.0


def test_type_hints_of_sampling_params_are_of_its_fields() -> None:
    """Type checkers see each field with its default, or None."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(SamplingParams) or ast))
    (init,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    arguments = init.args.args[1:]
    assert [argument.arg for argument in arguments] == [field.name for field in fields(SamplingParams)]
    assert [ast.literal_eval(default) for default in init.args.defaults] == [f.default for f in fields(SamplingParams)]
    assert all(ast.unparse(a.annotation).endswith("| None") for a in arguments if a.annotation)
