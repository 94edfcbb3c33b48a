"""The engine with rejected draft tokens: texts follow the target's law, and tests report the detectable deviation.

Ragged rows on one shared pool, a selection that drops most pages. The law of every token given its own text is known
from a dense pass with other attention code, so that windows far into the text are tested against an exact law.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.helpers.laws.eagle import EAGLE_MODELS, native_eagle_head
from tests.helpers.laws.enumeration import chain_law
from tests.helpers.laws.gtest import ALPHA, detectable, ranks, surprise, window_surprise
from tests.helpers.laws.tiny import MIXTURE, MODELS, PROMPTS, SETTING, V, finished, laws, native_mixture, started
from tests.helpers.slow_parameters import slow
from triforce.engine.tier_builder import ModelSet, SpeculativeConfig
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import Budget, RetrievalConfig

torch.set_num_threads(1)
LATE = 12  # windows begin here: several proposals have been verified, and ragged rows are at different ones
ROWS = 300
PLAIN = SamplingParams()
WARPED = SamplingParams(0.7, top_p=0.97, presence_penalty=0.2, frequency_penalty=0.01, logit_bias={3: 0.3})

LATER = RetrievalConfig(Budget(48), refresh=None, searched_layers=frozenset({0}))  # reselects after a rejection
FINER = RetrievalConfig(Budget(48), chunk=8, refresh=2)
MODEL_SETS = {
    "": lambda: MODELS, "features": lambda: EAGLE_MODELS, "native": native_eagle_head, "mixture": lambda: MIXTURE,
    "native-mixture": native_mixture,
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One engine test: pairs of tokens in 4 x 4 bins, of all windows from token LATE on."""

    mode: str
    params: SamplingParams
    texts: int
    bound: float  # on the detectable total variation
    tokens: int = 60
    setting: SpeculativeConfig = SETTING
    coupling: str = "rejection"
    of: str = ""  # rows whose texts are compared

    def sample(self, models: ModelSet) -> Tensor:
        params = replace(self.params, max_tokens=self.tokens)
        batches = range(0, self.texts, ROWS)
        rows = [min(ROWS, self.texts - first_row) for first_row in batches]
        parts = [
            finished(started(self.mode, self.coupling, params, n, first_row, self.setting, models))
            for first_row, n in zip(batches, rows, strict=True)
        ]
        return torch.cat(parts)

    def check(self) -> None:
        models = MODEL_SETS[self.of]()
        texts_BT = self.sample(models)
        laws_BTV = laws(texts_BT, self.params, models.target)
        likings_BTV = laws_BTV / (laws(texts_BT, self.params, MODELS.draft) + 1e-9)  # where a fault would show most
        ranks_BT = ranks(texts_BT, laws_BTV, likings_BTV)
        for first_token, window, bins in ((0, 1, 8), (LATE, 2, 4)):
            p_value, variation = window_surprise(ranks_BT, first_token, window, bins)
            print(
                f"{self.mode}: p = {p_value:.3f}; detectable total variation of {bins}^{window} cells {variation:.4f}"
            )
            assert variation < self.bound
            assert p_value > ALPHA


SHORT = [
    Trial("triforce", PLAIN, 80, 0.13, 40),
    Trial("triforce", WARPED, 80, 0.13, 40, coupling="block"),
    Trial("draft", WARPED, 80, 0.13, 40, of="features"),
    Trial("triforce", PLAIN, 80, 0.13, 40, coupling="block", of="features"),
    Trial("draft", PLAIN, 80, 0.13, 40, of="native"),
    Trial("triforce", PLAIN, 80, 0.13, 40, coupling="block", of="native"),
    Trial("triforce", WARPED, 80, 0.13, 40, coupling="block", of="mixture"),
    Trial("triforce", PLAIN, 80, 0.13, 40, of="native-mixture"),
    Trial("retrieval", WARPED, 80, 0.13, 40, coupling="block", of="native-mixture"),
]
MORE = [
    Trial("triforce", PLAIN, 120, 0.08),
    Trial("triforce", WARPED, 120, 0.08),
    Trial("retrieval", PLAIN, 80, 0.13, 40),
    Trial("ngram", WARPED, 80, 0.13, 40),
    Trial("streaming", PLAIN, 80, 0.13, 40),
    Trial("draft-ngram", PLAIN, 80, 0.13, 40),
    Trial("draft", WARPED, 80, 0.13, 40),
    Trial("triforce", PLAIN, 80, 0.13, 40, of="features"),
    Trial("triforce", PLAIN, 80, 0.13, 40, of="native"),
    Trial("triforce", PLAIN, 80, 0.13, 40, of="mixture"),
]
LONG = [
    Trial("triforce", PLAIN, 3000, 0.018),
    Trial("triforce", WARPED, 3000, 0.018),
    Trial("retrieval", WARPED, 1500, 0.025),
    Trial("ngram", PLAIN, 1500, 0.025),
    Trial("streaming", WARPED, 1500, 0.025),
    Trial("draft-ngram", WARPED, 1500, 0.025),
    Trial("triforce", PLAIN, 1500, 0.025, coupling="block"),
    Trial("draft-ngram", PLAIN, 1500, 0.025, coupling="block"),
    Trial("draft", PLAIN, 1500, 0.025),
    Trial("triforce", PLAIN, 1500, 0.025, of="features"),
    Trial("triforce", PLAIN, 1500, 0.025, of="native"),
    Trial("draft", PLAIN, 1500, 0.025, coupling="block", of="native"),
    Trial("triforce", PLAIN, 1500, 0.025, of="native-mixture"),
    Trial("triforce", WARPED, 1500, 0.025, coupling="block", of="mixture"),
    Trial("triforce", PLAIN, 900, 0.035, setting=replace(SETTING, retrieval_policy="quest", retrieval=LATER)),
    Trial("retrieval", PLAIN, 900, 0.035, setting=replace(SETTING, retrieval_policy="mean_key", retrieval=FINER)),
]


def name(trial: Trial) -> str:
    settings = "plain" if trial.params is PLAIN else "warped"
    draft = trial.of and f"{trial.of}-"
    return f"{trial.mode}-{draft}{settings}-{trial.setting.retrieval_policy}-{trial.coupling}-{trial.texts}"


@pytest.mark.parametrize("trial", [*SHORT, *slow(*MORE)], ids=name)
def test_engine_late_windows_follow_law(trial: Trial) -> None:
    trial.check()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trial", LONG, ids=name)
def test_engine_late_windows_follow_law_long(trial: Trial) -> None:
    trial.check()


def first_window(texts: int, window: int, bound: float) -> None:
    """Test the first tokens against the law of every possible text, counted along the target's own tree."""
    trial = Trial("triforce", PLAIN, texts, bound, tokens=window)
    cells_B = (trial.sample(MODELS) * V ** torch.arange(window).flip(0)).sum(1) + torch.arange(texts) % len(
        PROMPTS
    ) * V**window
    trees = []
    for i in range(len(PROMPTS)):

        def next_law(text: tuple[int, ...], i: int = i) -> list[float]:
            row = torch.tensor([[*text, 0]]).repeat(len(PROMPTS), 1)
            return laws(row, PLAIN)[i, -1].tolist()

        trees += [p for _, p in sorted(chain_law(next_law, window).items())]
    expected = torch.tensor(trees, dtype=torch.float64) * texts / len(PROMPTS)
    df = len(trees) - len(PROMPTS)
    variation = detectable(texts, len(trees) - len(PROMPTS))
    p_value = surprise(torch.bincount(cells_B, minlength=len(trees)), expected, groups=len(PROMPTS))
    print(f"first {window} tokens: p = {p_value:.3f}; detectable total variation with {df} degrees {variation:.4f}")
    assert variation < bound
    assert p_value > ALPHA


@pytest.mark.slow
def test_engine_first_tokens_follow_law() -> None:
    first_window(1500, 2, 0.15)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engine_first_tokens_follow_law_long() -> None:
    first_window(60_000, 3, 0.04)


def test_engine_selection_drops_most_of_context() -> None:
    batch = started("triforce", "rejection", replace(PLAIN, max_tokens=20), len(PROMPTS))
    finished(batch)
    draft, middle, _ = batch.tiers
    for row, prompt in enumerate(PROMPTS):
        choice = middle.cache.selections[row].pages
        visible_tokens = choice.tokens + len(prompt) - choice.end
        assert visible_tokens <= SETTING.retrieval.budget.tokens < len(prompt) / 2
        assert draft.cache.sinks + draft.cache.window < len(prompt) / 2
