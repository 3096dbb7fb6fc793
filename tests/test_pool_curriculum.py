"""The pool's curriculum against its own rules said otherwise: simulated learners, a slow reference for the choice, resumes, threads, a million rows, wrong input."""
import copy
import json
import sys
import threading
import time
import tracemalloc
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xland_minigrid.pool import curriculum as module
from xland_minigrid.pool.curriculum import DUE, RECENT, TIERS, UNTRIED, Curriculum, Schedule, SomeSolve, Tier, TierCurriculum, decayed_success

pytestmark = pytest.mark.newest


NAMES = {"easy": [f"e{i}" for i in range(4)], "middle": [{"name": "lake", "seed": i} for i in range(4)], "hard": [f"h{i}" for i in range(3)]}
EVERY = [task for tasks in NAMES.values() for task in tasks]
SOON = Schedule(active=3, patience=4)


def school(seed=0, schedule=SOON, tasks=NAMES, **options):
    return TierCurriculum(tasks, seed=seed, schedule=schedule, **options)


def play(curriculum, solves, n, log=None):
    "n episodes with what the curriculum chooses; `solves(task)` decides. Returns what was recorded."
    found = []
    for _ in range(n):
        task = curriculum.next_task()
        if log is not None:
            log.append(task)
        found.append(curriculum.record_result(task, solves(task), 0.0))
    return found


# Learners

def test_mastered_tasks_graduate_and_every_tier_is_reached():
    curriculum = school()
    reached = [what["advanced"] for what in play(curriculum, lambda task: True, 200) if what["advanced"]]
    assert reached == ["middle", "hard"]
    assert curriculum.stats()["graduated"] == len(EVERY) and all(curriculum.about(task)["kind"] == "graduated" for task in EVERY)


def test_reviews_double_and_a_failure_starts_again():
    curriculum, gaps, plays = TierCurriculum({"only": ["a"]}), [], []
    for _ in range(140):  # a single task is played every time; only the due plays count
        before = curriculum.about("a")
        what = curriculum.record_result(curriculum.next_task(), True, 1.0)
        if before["kind"] == "graduated" and before["due"] == what["last"]:
            gaps.append(before["interval"])
            plays.append(what["last"])
    assert gaps == [3, 6, 12, 24, 48] and np.diff([3, *plays]).tolist() == gaps
    due = curriculum.about("a")["due"]
    for _ in range(due - curriculum.episode - 1):
        curriculum.record_result("a", True, 1.0)
    what = curriculum.record_result("a", False, 0.0)
    assert what["interval"] == 3 and what["due"] == what["last"] + 3 and not what["undone"]  # one failure of ten: reviewed sooner, still mastered
    intervals = []
    for _ in range(50):
        if curriculum.about("a")["due"] == curriculum.episode + 1:
            intervals.append(curriculum.record_result("a", True, 1.0)["interval"])
        else:
            assert curriculum.record_result("a", True, 1.0)["interval"] == (intervals or [3])[-1]  # practice before the time changes nothing
    assert intervals[:4] == [6, 12, 24, 48][:len(intervals[:4])] and len(intervals) >= 3


def test_the_longest_interval_is_the_longest():
    curriculum = TierCurriculum({"only": ["a"]}, schedule=Schedule(longest_interval=10))
    seen = {curriculum.record_result("a", True, 1.0)["interval"] for _ in range(200)}
    assert seen == {0, 3, 6, 10}


def test_reviews_come_back_among_many():
    "With everything mastered, what is played has a gap of at least its interval whenever it counted as a review."
    curriculum, last, checked = school(schedule=Schedule(review_every=1)), {}, 0
    for _ in range(400):
        task = curriculum.next_task()
        key, before = json.dumps(task), curriculum.about(task)
        what = curriculum.record_result(task, True, 1.0)
        if before["kind"] == "graduated" and what["interval"] > before["interval"]:
            assert what["interval"] == min(2 * before["interval"], 48) and what["last"] - last[key] >= before["interval"]
            checked += 1
        if what["interval"] != before["interval"]:
            last[key] = what["last"]
    assert checked >= 30 and all(curriculum.about(task)["interval"] == 48 for task in EVERY)


def test_a_learner_that_forgets_loses_its_graduation():
    curriculum = school()
    play(curriculum, lambda task: True, 150)
    assert curriculum.stats()["graduated"] == len(EVERY)
    play(curriculum, lambda task: task != "e1", 300)
    assert curriculum.about("e1")["undone"] == 1
    assert curriculum.about("e1")["kind"] in ("studied", "resting") and curriculum.about("e0")["kind"] == "graduated"
    play(curriculum, lambda task: True, 500)  # and learns it again
    assert curriculum.about("e1")["kind"] == "graduated" and curriculum.about("e1")["undone"] == 1


def test_a_young_graduation_does_not_survive_a_failure():
    curriculum = school()
    whats = [curriculum.record_result("e0", x, 0.0) for x in (1, 1, 1, 0)]
    assert [what["kind"] for what in whats] == ["studied", "studied", "graduated", "studied"] and whats[-1]["undone"] == 1 and whats[-1]["interval"] == 0
    assert curriculum.record_result("e0", 1, 0.0)["kind"] == "graduated"  # 0.727 of the decayed success again


@pytest.mark.parametrize("attempts", [1, 2, 3, 7])
def test_graduation_needs_its_attempts(attempts):
    curriculum = school(schedule=Schedule(graduate_after=attempts))
    assert [curriculum.record_result("e0", True, 1.0)["kind"] == "graduated" for _ in range(attempts)] == [False] * (attempts - 1) + [True]


def test_hopeless_tasks_rest_longer_and_longer_and_do_not_eat_the_time():
    curriculum, log = school(), []
    play(curriculum, lambda task: task not in ("e0", "h0"), 600, log)
    late = log[200:]
    assert curriculum.tier.name == "hard" and curriculum.about("e0")["kind"] == "resting" and curriculum.about("e0")["interval"] > 48
    assert sum(task in ("e0", "h0") for task in late) < 0.05 * len(late)
    graduated = curriculum.stats()["graduated"]
    play(curriculum, lambda task: True, 800)  # the learner learns it after all
    assert curriculum.about("e0")["kind"] == "graduated" and curriculum.stats()["graduated"] == graduated + 2


def test_a_group_of_hopeless_tasks_only():
    curriculum, log = school(), []
    play(curriculum, lambda task: False, 400, log)
    assert curriculum.stats()["resting"] == len(EVERY) and curriculum.tier.name == "hard"  # nothing left to study, so on it goes
    assert set(map(json.dumps, log)) == set(map(json.dumps, EVERY))
    assert curriculum.next_task() in EVERY and len({json.dumps(task) for task in curriculum.next_tasks(11)}) == 11


# Tiers

def test_fast_track_after_three_and_the_regular_way():
    tiers = [Tier("easy", min_episodes=8, advance_rate=0.6, fast_track_rate=0.9), Tier("hard")]
    tasks = {"easy": [f"e{i}" for i in range(30)], "hard": ["h"]}
    curriculum = TierCurriculum(tasks, tiers)
    assert [curriculum.record_result(f"e{i}", True, 1.0)["advanced"] for i in range(3)] == [None, None, "hard"]
    curriculum = TierCurriculum(tasks, tiers)
    outcomes = [0, 1, 1, 1, 1, 1, 1, 1]
    assert [curriculum.record_result(f"e{i}", x, 1.0)["advanced"] for i, x in enumerate(outcomes)] == [None] * 7 + ["hard"]
    curriculum = TierCurriculum(tasks, tiers)
    outcomes = [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert not any(curriculum.record_result(f"e{i}", x, 1.0)["advanced"] for i, x in enumerate(outcomes))
    assert curriculum.record_result("h", True, 1.0)["advanced"] is None and curriculum.stats()["tier_episodes"] == 10  # other tiers do not count


def test_the_window_forgets():
    curriculum = TierCurriculum({"easy": [f"e{i}" for i in range(60)], "hard": ["h"]}, [Tier("easy", 10, advance_rate=1.0, mastery_window=4, fast_track_rate=2), Tier("hard")])
    outcomes = [0] * 9 + [1] * 4
    assert [curriculum.record_result(f"e{i}", x, 0.0)["advanced"] for i, x in enumerate(outcomes)] == [None] * 12 + ["hard"]


def test_tiers_are_found_by_name():
    curriculum = TierCurriculum({"expert": ["a"], "mine": ["b"]})
    assert curriculum.tiers == (TIERS[-1], Tier("mine"))


# The choice

def reference_choice(curriculum, every, reviewed):
    "The highest priority there is, by looking at every task."
    schedule, at = curriculum.schedule, curriculum._tier
    about = [curriculum.about(task) for task in every]
    position = {tier.name: i for i, tier in enumerate(curriculum.tiers)}
    studied = sum(a["kind"] == "studied" for a in about if a["tier"] == curriculum.tier.name)
    untried = [position[a["tier"]] for a in about if a["kind"] == "untried" and position[a["tier"]] <= at]
    found = [UNTRIED] if untried and studied < schedule.active else []
    review = curriculum.episode + 1 - reviewed >= schedule.review_every
    for a in about:
        due = a["kind"] in ("graduated", "resting") and a["due"] <= curriculum.episode + 1
        if a["kind"] in ("studied", "graduated") or due:
            found.append(a["priority"] - DUE * (due and not review))
    return max(found, default=None)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(EVERY), st.sampled_from([0, 0, 1, 1, 1, 0.5, True, False])), max_size=90), st.integers(0, 9),
       st.builds(Schedule, active=st.integers(1, 5), patience=st.integers(1, 6), review_every=st.integers(1, 4), graduate_after=st.integers(1, 4)))
def test_the_choice_has_the_highest_priority_and_the_books_are_right(records, seed, schedule):
    curriculum, reviewed, results = school(seed, schedule), -10**6, {}
    for mine, task, achieved in records:
        before = curriculum.state_dict()
        chosen = curriculum.next_task()
        many = curriculum.next_tasks(14)
        assert many[0] == chosen and len({json.dumps(task) for task in many[:len(EVERY)]}) >= min(4, len(EVERY))
        expected, a = reference_choice(curriculum, EVERY, reviewed), curriculum.about(chosen)
        if expected is not None:
            late = a["kind"] in ("graduated", "resting") and a["due"] <= curriculum.episode + 1
            allowed = curriculum.episode + 1 - reviewed >= schedule.review_every
            assert (UNTRIED if a["kind"] == "untried" else a["priority"] - DUE * (late and not allowed)) == pytest.approx(expected)
        assert curriculum.state_dict() == before  # asking changes nothing
        task = task if mine else chosen
        a = curriculum.about(task)
        what = curriculum.record_result(task, achieved, 0.25)
        if a["kind"] in ("graduated", "resting") and a["due"] <= what["last"]:
            reviewed = what["last"]
        results.setdefault(json.dumps(task), []).append(float(achieved))
        now = curriculum.about(task)
        assert now["attempts"] == len(results[json.dumps(task)])
        assert now["success"] == pytest.approx(np.average(results[json.dumps(task)][-10:], weights=0.85 ** np.arange(min(10, now["attempts"]))[::-1]))
        if now["kind"] == "graduated":
            assert now["success"] >= 0.7 and now["attempts"] >= schedule.graduate_after and now["interval"] in (3, 6, 12, 24, 48) and now["due"] > what["last"]
        if now["kind"] == "studied":
            assert now["interval"] == now["due"] == 0
    stats = curriculum.stats()
    kinds = [curriculum.about(task)["kind"] for task in EVERY]
    assert stats["episodes"] == len(records) == sum(map(len, results.values())) and stats["tried"] == len(results) == len(EVERY) - kinds.count("untried")
    assert all(stats[kind] == kinds.count(kind) for kind in ("studied", "graduated", "resting"))
    assert sum(row["episodes"] for row in stats["tiers"]) == len(records) and (not records or stats["success"] == pytest.approx(np.mean([curriculum.about(json.loads(text))["success"] for text in results])))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVERY), st.floats(0, 1)), max_size=60), st.integers(0, 60), st.integers(0, 3))
def test_a_resume_goes_on_to_the_same_choices(records, at, seed):
    one = school(seed)
    for task, x in records[:at]:
        one.record_result(task, x, 1.0)
    two = school(seed).load_state_dict(json.loads(json.dumps(one.state_dict())))
    for task, x in records[at:]:
        assert one.next_tasks(6) == two.next_tasks(6)
        assert one.record_result(task, x, 1.0) == two.record_result(task, x, 1.0)
    log = [], []
    assert play(one, lambda t: len(str(t)) % 2, 60, log[0]) == play(two, lambda t: len(str(t)) % 2, 60, log[1]) and log[0] == log[1]
    assert one.state_dict() == two.state_dict() and one.stats() == two.stats()


def test_the_recent_are_passed_over():
    curriculum = school(schedule=Schedule(graduate_after=1), tasks={"only": ["a", "b", "c", "d"]})
    for task in "abcd":
        curriculum.record_result(task, 0.5, 0.0)
    log = []
    play(curriculum, lambda task: 0.5, 9, log)
    assert all(len(set(log[i:i + 3])) == 3 for i in range(7))
    assert curriculum.about(log[-1])["priority"] == pytest.approx(25 - RECENT) and curriculum.about(log[-3])["priority"] == pytest.approx(25)


def test_only_so_many_are_begun_at_once():
    curriculum = school(tasks={"only": list(map(str, range(100)))}, schedule=Schedule(active=5, patience=50))
    play(curriculum, lambda task: False, 40)
    assert curriculum.stats()["tried"] == curriculum.stats()["studied"] == 5


def crowded():
    "Eight graduates that are all due, eight tasks half understood, nothing new, and no review of late."
    names = {"only": [f"g{i}" for i in range(8)] + [f"s{i}" for i in range(8)]}
    curriculum = TierCurriculum(names)
    for i in range(24):
        curriculum.record_result(f"g{i % 8}", 1.0, 0.0)
    for i in range(24):
        curriculum.record_result(f"s{i % 8}", 0.6, 0.0)
    return TierCurriculum(names), curriculum


def test_reviews_get_one_episode_in_three():
    fresh, curriculum = crowded()
    assert {curriculum.about(task)["kind"] for task in curriculum.next_tasks(16)[:3]} == {"graduated", "studied"}
    many = curriculum.next_tasks(6)
    assert [task[0] for task in many] == list("gssgss")
    assert [curriculum.next_tasks(n) for n in (1, 4)] == [many[:1], many[:4]]
    log = []
    play(curriculum, lambda task: 1.0 if task[0] == "g" else 0.6, 6, log)
    assert [task[0] for task in log] == list("gssgss")


def test_a_resume_remembers_the_last_review():
    fresh, curriculum = crowded()
    again = fresh.load_state_dict(curriculum.state_dict())
    assert again.next_tasks(9) == curriculum.next_tasks(9) and again.next_task()[0] == "g"
    curriculum.record_result(curriculum.next_task(), 1.0, 0.0)
    assert crowded()[0].load_state_dict(curriculum.state_dict()).next_task()[0] == curriculum.next_task()[0] == "s"


def test_among_equals_the_least_recently_tried_comes_first():
    curriculum = school(schedule=Schedule(active=4), tasks={"only": list("abcdef")})
    for task in "dabcfe":
        curriculum.record_result(task, 0.5, 0.0)
    assert curriculum.next_tasks(6) == list("dabcfe")


def test_what_was_forgotten_is_studied_on_in_the_next_tier():
    curriculum = TierCurriculum({"easy": list("abcdefgh"), "hard": ["z"]}, [Tier("easy", 7, fast_track_rate=2), Tier("hard")])
    for task, success in zip("aaaabcd", (1, 1, 1, 0, 0, 1, 1)):
        what = curriculum.record_result(task, success, 0.0)
    assert what["advanced"] == "hard" and curriculum.about("a")["undone"] == 1
    assert [curriculum.about(task)["kind"] for task in "abc"] == ["studied", "resting", "resting"] and curriculum.about("b")["due"] == 7 + 48


def test_only_the_last_attempts_are_remembered():
    curriculum = school()
    for success in [0.0] * 30 + [1.0] * 10:
        curriculum.record_result("e0", success, 0.0)
    assert curriculum.about("e0")["success"] == 1 and len(curriculum.about("e0")["results"]) == 10


def test_many_at_once():
    curriculum = school()
    tasks = curriculum.next_tasks(4)
    assert sorted(tasks) == NAMES["easy"] and curriculum.next_tasks(6) == tasks + tasks[:2]  # no task of a tier that is not reached


def test_seeds_decide_among_equals_and_nothing_else_does():
    first = {seed: [curriculum.next_tasks(4) for curriculum in (school(seed), school(seed))] for seed in range(20)}
    assert all(a == b for a, b in first.values()) and len({tuple(a) for a, _ in first.values()}) > 8
    counts = np.bincount([int(school(seed).next_task()[1]) for seed in range(2000)], minlength=4)
    assert counts.min() > 400  # each task is equally likely to be the first
    state = np.random.get_state()[1].copy()
    play(school(), lambda task: True, 20)
    assert (np.random.get_state()[1] == state).all()  # no generator of somebody else is touched


def test_a_seed_of_the_caller_is_ignored():
    curriculum = TierCurriculum({"only": [{"ruleset_id": 3}, {"name": "lake", "seed": 1}]})
    assert curriculum.record_result({"ruleset_id": 3, "seed": 9}, True, 1.0)["attempts"] == 1 and curriculum.about({"ruleset_id": 3})["attempts"] == 1
    with pytest.raises(ValueError, match="record what"):
        curriculum.record_result({"name": "lake", "seed": 2}, True, 1.0)


# Many at once, very many tasks

def test_threads_lose_no_result(monkeypatch):
    learn = module._Task.learn
    monkeypatch.setattr(module._Task, "learn", lambda *arguments: (time.sleep(0), learn(*arguments)))  # another thread may have its turn in the middle
    curriculum = school(schedule=Schedule(active=4))
    errors, episodes, n = [], [], 150

    def hammer(i):
        try:
            for k in range(n):
                episodes.append(curriculum.record_result(curriculum.next_task(), (i + k) % 3 > 0, 1.0)["last"])
                if k % 30 == 0:
                    curriculum.stats(), curriculum.state_dict(), curriculum.next_tasks(5)
        except Exception as error:  # a failure in a thread must fail the test
            errors.append(error)
    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(8)]
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(old)
    stats = curriculum.stats()
    assert sorted(episodes) == list(range(1, 8 * n + 1))  # every result has an episode of its own
    assert not errors and stats["episodes"] == 8 * n == sum(curriculum.about(task)["attempts"] for task in EVERY)
    school(schedule=Schedule(active=4)).load_state_dict(curriculum.state_dict())


def test_a_million_rows():
    "Ten thousand of a tier take part, and only those that were tried are saved."
    curriculum = TierCurriculum.over(np.random.default_rng(0).gamma(2, size=1_000_000), seed=1)
    assert curriculum.stats()["tasks"] == 50_000 and curriculum.next_tasks(5) == TierCurriculum.over(np.random.default_rng(0).gamma(2, size=1_000_000), seed=1).next_tasks(5)
    for i in range(300):
        curriculum.record_result(curriculum.next_task(), i % 7 > 1, 0.0)
    assert curriculum.stats()["tried"] <= 300 and len(json.dumps(curriculum.state_dict())) < 60_000


def test_tiers_by_difficulty():
    values = np.array([5, np.nan, 1, 4, 2, 3, np.nan, 0.0])
    curriculum = TierCurriculum.over(values, tiers=[Tier("low"), Tier("high")])
    row = lambda i: {"ruleset_id": i}
    assert [curriculum.about(row(i))["tier"] for i in (7, 2, 4)] == ["low"] * 3 and [curriculum.about({"ruleset_id": i, "seed": 9})["tier"] for i in (5, 3, 0)] == ["high"] * 3
    with pytest.raises(ValueError, match="not a task"):
        curriculum.record_result(row(1), True, 1.0)
    assert {task["ruleset_id"] for task in curriculum.next_tasks(3)} == {2, 4, 7}
    rng = np.random.default_rng(2)
    values = rng.random(1003)
    curriculum = TierCurriculum.over(values)
    tiers = np.array([[t.name for t in TIERS].index(curriculum.about(row(i))["tier"]) for i in range(1003)])
    assert np.ptp(np.bincount(tiers)) <= 1 and all(values[tiers == i].max() <= values[tiers == i + 1].min() for i in range(4))


def test_over_a_measure_of_difficulty():
    from xland_minigrid.benchmarks.difficulty import Difficulty
    n = 40
    zeros = np.zeros(n, np.uint8)
    found = Difficulty(np.arange(n) % 8 > 0, zeros, np.arange(n, dtype=np.uint8), zeros, zeros, zeros.astype(np.float32), *np.full((2, n), np.nan, np.float32))
    curriculum = TierCurriculum.over(found, by="num_steps")
    assert curriculum.about({"ruleset_id": 1})["tier"] == "warmup" and curriculum.about({"ruleset_id": 39})["tier"] == "expert"
    with pytest.raises(ValueError, match="not a task"):
        curriculum.about({"ruleset_id": 8})  # has no plan
    with pytest.raises(ValueError, match="by="):
        TierCurriculum.over(found)  # nothing was measured
    with pytest.raises(ValueError, match="beauty"):
        TierCurriculum.over(found, by="beauty")


# What makes no sense

@pytest.mark.parametrize("make, error", [
    (lambda: TierCurriculum(["a"]), TypeError), (lambda: TierCurriculum({}), ValueError), (lambda: TierCurriculum({"a": []}), ValueError),
    (lambda: TierCurriculum({"a": "abc"}), TypeError), (lambda: TierCurriculum({"a": 3}), TypeError), (lambda: TierCurriculum({"a": ["x"], "b": ["x"]}), ValueError),
    (lambda: TierCurriculum({"a": [{"p": object()}]}), TypeError), (lambda: TierCurriculum({"a": ["x"]}, seed=1.5), ValueError), (lambda: TierCurriculum({"a": ["x"]}, seed=True), ValueError),
    (lambda: TierCurriculum({"a": ["x"]}, schedule=3), TypeError), (lambda: TierCurriculum({"": ["x"]}), ValueError), (lambda: TierCurriculum.over([[1.0]]), TypeError),
    (lambda: TierCurriculum.over(["a"]), TypeError), (lambda: TierCurriculum.over({"a": 1}), TypeError), (lambda: TierCurriculum.over([1.0, 2.0]), ValueError),
    (lambda: TierCurriculum.over(np.arange(9.0), tiers=[]), ValueError), (lambda: TierCurriculum.over(np.arange(9.0), tiers=[Tier("a"), Tier("a")]), ValueError),
    (lambda: TierCurriculum.over(np.arange(9.0), tiers=["a"]), ValueError),
    (lambda: Tier(""), ValueError), (lambda: Tier("a", 0), ValueError), (lambda: Tier("a", 2.5), ValueError), (lambda: Tier("a", advance_rate=1.1), ValueError),
    (lambda: Tier("a", mastery_threshold=float("nan")), ValueError), (lambda: Tier("a", mastery_window=0), ValueError), (lambda: Tier("a", advance_rate="much"), ValueError),
    (lambda: Schedule(decay=2), ValueError), (lambda: Schedule(longest_interval=2), ValueError), (lambda: Schedule(active=0), ValueError), (lambda: Schedule(patience=True), ValueError)])
def test_wrong_settings(make, error):
    with pytest.raises(error):
        make()


@pytest.mark.parametrize("arguments, error", [
    (("e0", None, 1.0), TypeError), (("e0", True, None), TypeError), (("e0", "yes", 1.0), TypeError), (("e0", 1.5, 1.0), ValueError), (("e0", -0.1, 1.0), ValueError),
    (("e0", float("nan"), 1.0), ValueError), (("e0", True, float("inf")), ValueError), (("e0", True, float("nan")), ValueError), (("zebra", True, 1.0), ValueError),
    ((0, True, 1.0), ValueError), (({"name": "lake", "seed": 99}, True, 1.0), ValueError), ((object(), True, 1.0), TypeError), ((None, True, 1.0), ValueError)])
def test_wrong_results_are_not_recorded(arguments, error):
    curriculum = school()
    curriculum.record_result("e0", True, 1.0)
    before = curriculum.state_dict()
    with pytest.raises(error):
        curriculum.record_result(*arguments)
    assert curriculum.state_dict() == before


@pytest.mark.parametrize("task", ["a", 1.0, True, None, {"seed": 3}, {"ruleset_id": "1"}, -1, 10, 2**70])
def test_what_is_no_row(task):
    with pytest.raises((TypeError, ValueError), match="curriculum"):
        TierCurriculum.over(np.arange(10.0)).record_result(task, True, 1.0)


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2", None])
def test_wrong_numbers_of_tasks(n):
    with pytest.raises(ValueError, match="n is"):
        school().next_tasks(n)


def test_tasks_are_copies():
    curriculum = school(tasks={"only": [{"name": "lake"}]})
    curriculum.next_task()["name"] = "spoilt"
    assert curriculum.next_task() == {"name": "lake"}


def test_states_of_other_curricula_are_refused():
    curriculum = school()
    play(curriculum, lambda task: True, 30)
    state = curriculum.state_dict()
    for other in (school(1), school(schedule=Schedule()), school(tasks={"easy": ["a"]}), school(tiers=[Tier("easy", 3)]), TierCurriculum.over(np.arange(20.0))):
        with pytest.raises(ValueError, match="other"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="other"):
        school().load_state_dict({})
    with pytest.raises(TypeError):
        school().load_state_dict([1])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_states_are_refused_and_change_nothing(data):
    curriculum = school()
    play(curriculum, lambda task: len(str(task)) % 3 > 0, 40)
    good = json.loads(json.dumps(curriculum.state_dict()))
    bad = copy.deepcopy(good)
    where = data.draw(st.sampled_from([bad, *bad["state"][1].values()] + bad["state"]))
    key = data.draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
    if data.draw(st.booleans()):
        del where[key]
    else:
        where[key] = ["nonsense", where[key]]
    target = school()
    target.record_result("e0", True, 1.0)
    before = target.state_dict()
    with pytest.raises(ValueError, match="damaged"):
        target.load_state_dict(bad)
    assert target.state_dict() == before
    assert target.load_state_dict(good).state_dict() == good


def test_beside_a_checkpoint(tmp_path):
    from xland_minigrid.baselines.checkpoint import Checkpoints
    curriculum = school()
    play(curriculum, lambda task: True, 25)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(25, {"x": np.zeros(2)}, about={"curriculum": curriculum.state_dict()})
    again = school().load_state_dict(Checkpoints(tmp_path).record()["about"]["curriculum"])
    assert again.next_tasks(8) == curriculum.next_tasks(8) and again.state_dict() == curriculum.state_dict()


def test_decayed_success():
    assert decayed_success([]) == 0 and decayed_success([1]) == 1 and decayed_success([0, 1], 0.5) == pytest.approx(2 / 3)
    assert decayed_success([1, 0], 0) == 0 and decayed_success([0, 1], 1) == 0.5


# Tasks that some of a group solved

def test_what_some_solved_comes_again():
    curriculum = SomeSolve([{"seed": i} for i in range(50)], again=0.5)
    assert [t["seed"] for t in curriculum.next_tasks(10)] == list(range(10))
    for task, share in zip(curriculum.next_tasks(10), [0, 0.5, 1, 0.9, 0.25, 0, 0.75, 1, 1, 0]):
        curriculum.record_result(task, share)
    assert sorted(curriculum.old) == [1, 4, 6] and curriculum.about({"seed": 4}) == {"number": 4, "again": True}
    tasks = curriculum.next_tasks(10)
    assert tasks == curriculum.next_tasks(10) and len({t["seed"] for t in tasks}) == 10 and {t["seed"] for t in tasks if t["seed"] < 10} <= {1, 4, 6}
    assert curriculum.next_task() == curriculum.next_tasks(1)[0]
    curriculum.record_result({"seed": 4}, 1.0)
    assert sorted(curriculum.old) == [1, 6]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.integers(1, 7))
def test_tasks_that_some_solve_go_on_where_they_were(shares, n):
    make = lambda: SomeSolve([{"seed": i} for i in range(23)], keep=5, seed=3)
    one, other = make(), make()
    for i in range(0, len(shares), n):
        for task, share in zip(one.next_tasks(n), shares[i:i + n]):
            one.record_result(task, share)
        other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert one.next_tasks(9) == other.next_tasks(9) and len(one.old) <= 5


def test_results_and_states_of_others():
    curriculum = SomeSolve([{"seed": 1}])
    for task, share in (({"seed": 2}, 0.5), ({"seed": 1}, 1.5), ({"seed": 1}, float("nan"))):
        with pytest.raises(ValueError):
            curriculum.record_result(task, share)
    with pytest.raises(ValueError, match="same ones"):
        curriculum.load_state_dict(SomeSolve([1, 2]).state_dict())
    assert curriculum.records == 0


# What people see

class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_tables_are_whole_and_escape_names():
    curriculum = TierCurriculum({"<b>": ["a"], "hard & long": ["c"]})
    play(curriculum, lambda task: True, 5)
    for shown in (curriculum._repr_html_(), school()._repr_html_()):
        parser = Balanced()
        parser.feed(shown)
        assert not parser.open
    assert "&lt;b&gt;" in curriculum._repr_html_() and "hard &amp; long" in curriculum._repr_html_()
    assert json.dumps(curriculum.stats()) and repr(school()) == \
        "TierCurriculum(episode 0, tier easy, 0 of 11 tasks tried, 0 graduated, success 0.00)"
