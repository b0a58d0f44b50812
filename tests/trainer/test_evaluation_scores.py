"""The metrics of an evaluation, compared with slow implementations that use exact fractions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest

from rljob_api.v1alpha1.dataset import Evaluation, metric_names, pass_at_ks
from rljob_api.v1alpha1.reward import Reward
from rljob_trainer.controller.evaluations.evaluation import extracted_answers
from rljob_trainer.controller.evaluations.scores import ScoredResponse, evaluation_metrics, majority_score, pass_at_k
from rljob_trainer.observability.samples import Sample, SampleKind


def plain_pass_at_k(passes: Sequence[bool], k: int) -> Fraction:
    """The fraction of all subsets of k responses with at least one that passes."""
    subsets = list(combinations(passes, k))
    return Fraction(sum(map(any, subsets)), len(subsets))


@pytest.mark.parametrize("num_samples", range(1, 11))
def test_pass_at_k_is_the_fraction_of_subsets_with_a_response_that_passes(num_samples: int) -> None:
    for num_passed in range(num_samples + 1):
        passes = [True] * num_passed + [False] * (num_samples - num_passed)
        for k in range(1, num_samples + 1):
            expected = float(plain_pass_at_k(passes, k))
            assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected, rel=1e-13, abs=1e-15)


def test_pass_at_k_does_not_overflow() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    assert pass_at_k(100_000, 0, 1) == 0
    assert pass_at_k(100_000, 50_001, 50_000) == 1


def test_the_ks_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [pass_at_ks(number) for number in (1, 2, 3, 6, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 6], [1, 2, 4, 8]]


def responses(*groups: Sequence[tuple[float | None, str | None]]) -> list[ScoredResponse]:
    """Responses with these scores and answers, one group for each prompt."""
    return [
        ScoredResponse(prompt, score, {"score": score}, answer, 4)
        for prompt, group in enumerate(groups)
        for score, answer in group
    ]


def test_the_majority_decides_and_responses_without_an_answer_do_not_vote() -> None:
    for group, expected in (
        ([(1, "4"), (0, "5"), (1, "4")], 1.0),
        ([(0, "5"), (0, " 5 "), (1, "4")], 0.0),
        # A tie: the mean of both answers.
        ([(0, "5"), (1, "4")], 0.5),
        ([(0, ""), (0, ""), (1, "4")], 1.0),
        # No answer at all.
        ([(0.25, ""), (0.75, "")], 0.5),
        # The same answer with another format: its mean score.
        ([(1.5, "4"), (1.0, "4"), (0, "5")], 1.25),
        ([(None, "5"), (None, "5"), (1, "4")], 1.0),
        ([(None, "5")], None),
        ([(1, None), (0, None)], None),
    ):
        assert majority_score(responses(group)) == expected, group


def test_only_answers_vote_and_not_what_a_judge_or_a_test_report_says() -> None:
    judge = {"url": "http://judge/v1", "model": "m", "rubric": "{response}", "pattern": "(.)"}
    style = Reward.from_wire({"name": "style", "type": "Judge", "judge": judge})
    tests = Reward.from_wire({"name": "tests", "type": "Code"})
    own = Reward.from_wire({"name": "own", "type": "Function", "function": {"path": "my_rewards:score"}})
    right = Reward.from_wire({"name": "right", "type": "MathAnswer"})
    found = [{"style": "Prose. Score: 4", "tests": "passed 1 of 2 tests", "right": "18"}, {"style": "More prose."}]
    samples = [Sample(1, SampleKind.SAMPLED, 0, "p", "r", "18", 1.0, found=each) for each in found]
    assert extracted_answers(samples, [style, tests]) == [None, None]
    # A function that returns only numbers has found nothing.
    assert extracted_answers(samples, [style, own, right]) == ["18", ""]
    with_own = [replace(each, found={**each.found, "own": "17"}) for each in samples]
    assert extracted_answers(with_own, [tests, own, right]) == ["17", "17"]


def test_all_metrics_of_random_responses_equal_those_of_exact_fractions() -> None:
    draw = random.Random(3)
    groups = [[(draw.choice([0.0, 0.5, 1.0, 1.5]), draw.choice("abc")) for _ in range(6)] for _ in range(9)]
    greedy = [[(draw.choice([0.0, 1.0]), "a")] for _ in range(9)]
    spec = Evaluation(name="x", num_samples=6)
    found = evaluation_metrics(spec, responses(*greedy), responses(*groups))
    passes = [[score >= 1 for score, _ in group] for group in groups]
    expected = {
        "eval/x/greedy": Fraction(sum(int(score) for [(score, _)] in greedy), 9),
        "eval/x/mean_at_6": sum(Fraction(score) for group in groups for score, _ in group) / 54,
        "eval/x/maj_at_6": sum(map(plain_majority, groups), Fraction(0)) / 9,
        "eval/x/excluded_fraction": Fraction(0),
        "eval/x/response_length_mean": Fraction(4),
    }
    expected |= {f"eval/x/pass_at_{k}": sum(plain_pass_at_k(each, k) for each in passes) / 9 for k in (1, 2, 4, 6)}
    assert found == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-13)
    assert set(found) == set(metric_names(spec))
    # The order of the responses does not change a bit.
    order = [*zip(responses(*greedy), range(9), strict=True)]
    draw.shuffle(order)
    shuffled = [each for each, _ in order]
    mixed = responses(*groups)
    draw.shuffle(mixed)
    assert evaluation_metrics(spec, shuffled, mixed) == found


def plain_majority(group: Sequence[tuple[float, str]]) -> Fraction:
    answers = [answer for _, answer in group]
    most = max(answers.count(each) for each in answers)
    winners = [each for each in sorted(set(answers)) if answers.count(each) == most]
    means = [Fraction(sum(Fraction(score) for score, answer in group if answer == each), most) for each in winners]
    return sum(means, Fraction(0)) / len(means)


def test_responses_without_a_score_are_left_out() -> None:
    spec = Evaluation(num_samples=2, greedy=False)
    found = evaluation_metrics(spec, [], responses([(1, None), (None, None)], [(0, None), (0, None)]))
    assert found == {
        # Each prompt has the same weight, although the first one has only one score.
        "eval/heldout/mean_at_2": 0.5,
        "eval/heldout/pass_at_1": 0.5,
        "eval/heldout/pass_at_2": 0.5,
        "eval/heldout/excluded_fraction": 0.25,
        "eval/heldout/response_length_mean": 4.0,
    }
    nothing = evaluation_metrics(spec, [], responses([(None, None), (None, None)]))
    assert nothing == {"eval/heldout/excluded_fraction": 1.0, "eval/heldout/response_length_mean": 4.0}


@pytest.mark.parametrize("excluded_share", [0.0, 0.5])
def test_pass_at_1_is_the_mean_and_pass_at_k_never_decreases(excluded_share: float) -> None:
    draw = random.Random(5)

    def score() -> float | None:
        return None if draw.random() < excluded_share else float(draw.random() < 0.3)

    found = evaluation_metrics(
        Evaluation(name="x", num_samples=8, greedy=False),
        [],
        responses(*([(score(), None) for _ in range(8)] for _ in range(20))),
    )
    passes = [found[f"eval/x/pass_at_{k}"] for k in (1, 2, 4, 8)]
    assert passes[0] == pytest.approx(found["eval/x/mean_at_8"], rel=1e-12)
    assert passes == sorted(passes)


def test_a_sum_of_weights_that_is_one_in_decimals_passes() -> None:
    score = 0.7 + 0.2 + 0.1
    assert score < 1
    spec = Evaluation(greedy=False)
    assert evaluation_metrics(spec, [], responses([(score, None)]))["eval/heldout/pass_at_1"] == 1
    strict = spec.model_copy(update={"pass_threshold": 1.1})
    assert evaluation_metrics(strict, [], responses([(score, None)]))["eval/heldout/pass_at_1"] == 0


def test_with_several_rewards_each_has_its_mean() -> None:
    sampled = [
        ScoredResponse(0, 1.2, {"right": 1.0, "format": 1.0}),
        ScoredResponse(0, 0.0, {"right": 0.0, "format": None}),
    ]
    found = evaluation_metrics(Evaluation(num_samples=2), sampled[:1], sampled)
    named = {name: value for name, value in found.items() if "/reward/" in name}
    assert named == {
        "eval/heldout/reward/right/greedy": 1.0,
        "eval/heldout/reward/right/mean_at_2": 0.5,
        "eval/heldout/reward/format/greedy": 1.0,
        "eval/heldout/reward/format/mean_at_2": 1.0,
    }


def test_each_source_has_the_scores_of_its_own_prompts() -> None:
    sources, spec = ["aime", "gsm8k", "aime"], Evaluation(name="x", num_samples=2)
    greedy, sampled = (
        [replace(each, source=sources[each.prompt]) for each in responses(*groups)]
        for groups in (
            ([(1, "a")], [(0, "b")], [(0, "c")]),
            ([(1, "a"), (0, "b")], [(None, ""), (1, "c")], [(0, "d"), (0, "d")]),
        )
    )
    found = evaluation_metrics(spec, greedy, sampled)
    of_sources = {name.removeprefix("eval/x/source/"): value for name, value in found.items() if "/source/" in name}
    assert of_sources == {
        "aime/greedy": 0.5,
        "aime/mean_at_2": 0.25,
        "aime/pass_at_1": 0.25,
        "aime/pass_at_2": 0.5,
        "aime/maj_at_2": 0.25,
        "aime/excluded_fraction": 0.0,
        # Of the two sampled responses one has no score.
        "gsm8k/greedy": 0.0,
        "gsm8k/mean_at_2": 1.0,
        "gsm8k/pass_at_1": 1.0,
        "gsm8k/pass_at_2": 1.0,
        "gsm8k/maj_at_2": 1.0,
        "gsm8k/excluded_fraction": pytest.approx(1 / 3),
    }
    # The scores of all prompts are what they are without sources.
    plain = evaluation_metrics(spec, *([replace(each, source="") for each in part] for part in (greedy, sampled)))
    assert plain == {name: value for name, value in found.items() if "/source/" not in name}
