"""Requests to a daemon, many at a time, and what holds of every answer."""
import time

import spillway

AT_A_TIME = 60  # below limits.requests, so that the connection is always read

USAGE = {"prompt", "completion", "reasoning", "cached", "recomputed", "draft"}
TIMINGS = {"queue_ms", "restore_ms", "prefill_ms", "decode_ms", "ttft_ms"}


def ask_all(client, requests):
    """The answers to all of these parameters of gen.start, in order; as many run side by side as the daemon lets."""
    answers = []
    for begin in range(0, len(requests), AT_A_TIME):
        batch = [{"stream": False, "return_ids": True, **params} for params in requests[begin:begin + AT_A_TIME]]
        generations = [client.generate(**params) for params in batch]
        for generation, params in zip(generations, batch):
            answer = generation.result()
            check_answer(answer, params)
            answers.append(answer)
    return answers


def ask_one_by_one(client, requests):
    return [ask_all(client, [params])[0] for params in requests]


def ask_events(client, **params):
    """One streamed answer, and its events."""
    params = {"return_ids": True, **params}
    generation = client.generate(**params)
    events = list(generation)
    answer = generation.result()
    check_answer(answer, params)
    check_events(events, answer, params)
    return answer, events


def ids_of(answers):
    return [answer["ids"] for answer in answers]


def check_answer(answer, params):
    usage, draft = answer["usage"], answer["usage"]["draft"]
    assert set(usage) == USAGE and set(answer["timings"]) == TIMINGS
    assert all(ms >= 0 for ms in answer["timings"].values())
    assert answer["finish_reason"] != "error", answer
    assert answer["message"]["content"] == answer["text"]
    assert usage["completion"] == len(answer["ids"]) <= params.get("max_tokens", usage["completion"])
    if answer["finish_reason"] == "length":
        assert usage["completion"] == params["max_tokens"]
    if "prompt_ids" in params and "session" not in params:
        assert usage["prompt"] == len(params["prompt_ids"])
    assert usage["cached"]["device"] % 64 == 0 and usage["cached"]["device"] < usage["prompt"]
    assert 0 <= usage["recomputed"] <= usage["prompt"] - usage["cached"]["device"]
    assert 0 <= draft["accepted"] <= draft["proposed"]
    # Every pass gives its own token and the drafts it accepted; a stop string may leave some of the last one's unused.
    by_passes = usage["completion"] - 1
    assert draft["steps"] <= by_passes <= draft["steps"] + draft["accepted"]
    if params.get("speculate") is False:
        assert draft == {"steps": by_passes, "proposed": 0, "accepted": 0}
    if "logprobs" in params:
        assert [entry["id"] for entry in answer["logprobs"]] == answer["ids"]
        for entry in answer["logprobs"]:
            top = [other["logprob"] for other in entry["top"]]
            assert len(top) == params["logprobs"] and top == sorted(top, reverse=True)
            assert entry["logprob"] <= 0 and all(entry["logprob"] <= best for best in top[:1])


def check_events(events, answer, params):
    """The client has checked that `seq` counts from 0 and that nothing follows the answer."""
    deltas = [event for event in events if event["type"] == "delta"]
    accepted = events[0]
    assert accepted["type"] == "accepted" and accepted["n_prompt"] == answer["usage"]["prompt"]
    assert accepted["cached"] == answer["usage"]["cached"]
    for channel, whole in (("content", answer["text"]), ("reasoning", answer["message"].get("reasoning", ""))):
        assert "".join(delta["text"] for delta in deltas if delta["channel"] == channel) == whole
    assert sum((delta["ids"] for delta in deltas), []) == answer["ids"]
    if "logprobs" in params:
        assert sum((delta["logprobs"] for delta in deltas), []) == answer["logprobs"]


def accept_length(answers):
    """Tokens committed by verify passes, over the passes; for answers that no stop string cut short."""
    passes = sum(answer["usage"]["draft"]["steps"] for answer in answers)
    return sum(answer["usage"]["completion"] - 1 for answer in answers) / passes


def generate_error(client, **params):
    """The refusal that these parameters must get."""
    try:
        client.complete(**params)
    except spillway.DaemonError as error:
        return error
    raise AssertionError(f"not refused: {params}")


def n_private(daemon):
    """Slots of the device that running seqs hold for themselves, by group."""
    metrics = daemon.metrics()
    groups = [name.split('"')[1] for name in metrics if name.startswith("spillway_pool_slots{")]
    assert len(groups) == 4
    return {group: metrics[f'spillway_pool_slots{{group="{group}"}}'] -
            metrics[f'spillway_pool_free_slots{{group="{group}"}}'] -
            metrics[f'spillway_pool_indexed_slots{{group="{group}"}}'] for group in groups}


def wait_until_all_is_home(daemon, seconds=30):
    """Plans that were on their way when the last answer came still hold pages."""
    end = time.monotonic() + seconds
    while any((left := n_private(daemon)).values()):
        assert time.monotonic() < end, left
        time.sleep(0.02)
