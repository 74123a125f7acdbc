"""What left the device comes back from host memory, and nobody sees it but in the times."""
import concurrent.futures

import pytest
from conftest import ROOT
from tiny_pair import TinyPair, device_bytes

PAIR = TinyPair(ROOT / "share/tiny", ROOT / "tests/golden/tiny-pair.json")
TEXT = [token for prompt in PAIR.prompts for token in prompt]


def generate(client, ids, n=24, **params):
    return client.call("gen.start", {"prompt_ids": ids, "max_tokens": n, "temperature": 0, "ignore_eos": True,
                                     "stream": False, "return_ids": True, **params})


def evict(client, tier):
    return client.call("cache.evict", {"tier": tier, "all": True})


def test_a_prefix_comes_back_from_host_memory_to_the_last_page(daemon, long):
    with daemon(**{"kv.host_bytes": "128MiB", "kv.restore": "always"}).connect() as client:
        for k in range(1, 41 if long else 3):
            for n_prompt in 64 * k - 1, 64 * k, 64 * k + 1:
                ids = TEXT[n_prompt : 2 * n_prompt]
                cold = generate(client, ids)
                evict(client, "device")
                warm = generate(client, ids)
                b = (n_prompt - 1) // 64 * 64
                assert warm["usage"]["cached"] == {"device": 0, "host": b, "disk": 0}, n_prompt
                assert warm["ids"] == cold["ids"]
                again = generate(client, ids)
                assert again["usage"]["cached"] == {"device": b, "host": 0, "disk": 0}
                assert again["ids"] == cold["ids"]


def test_drafts_after_a_restore_are_as_good_as_before(daemon):
    with daemon(**{"kv.host_bytes": "64MiB", "kv.restore": "always", "draft.fallback": "false"}).connect() as client:
        ids = TEXT[:700]
        generate(client, ids, n=1)
        warm = generate(client, ids, n=64)["usage"]["draft"]
        evict(client, "device")
        restored = generate(client, ids, n=64)
        assert restored["usage"]["cached"]["host"] == 640
        assert restored["usage"]["draft"] == warm


def test_what_left_host_memory_too_is_computed(daemon):
    with daemon(**{"kv.host_bytes": "64MiB", "kv.restore": "always"}).connect() as client:
        ids = TEXT[:500]
        cold = generate(client, ids)
        evict(client, "device")
        assert evict(client, "host")["pages"] > 0
        assert client.call("cache.lookup", {"prompt_ids": ids}) == {"device": 0, "host": 0, "disk": 0}
        again = generate(client, ids)
        assert again["usage"]["cached"] == {"device": 0, "host": 0, "disk": 0}
        assert again["ids"] == cold["ids"]


def test_restoring_never_means_computing(daemon):
    with daemon(**{"kv.host_bytes": "64MiB", "kv.restore": "never"}).connect() as client:
        ids = TEXT[:300]
        cold = generate(client, ids)
        evict(client, "device")
        again = generate(client, ids)
        assert again["usage"]["cached"] == {"device": 0, "host": 0, "disk": 0}
        assert again["ids"] == cold["ids"]


def test_a_session_goes_on_from_host_memory(daemon):
    with daemon(**{"kv.host_bytes": "64MiB", "kv.restore": "always"}).connect() as client:
        turns = ["The code of the red door is 2766. Remember it.", "Count to ten.", "What is the code of the red door?"]

        def talk(name, forget):
            client.call("session.open", {"name": name})
            for turn in turns:
                answer = client.call("gen.start", {"messages": [{"role": "user", "content": turn}], "session": name,
                                                   "temperature": 0, "max_tokens": 48, "stream": False,
                                                   "return_ids": True})
                yield answer["ids"], answer["usage"]["cached"]
                if forget:
                    evict(client, "device")

        plain = list(talk("a", False))
        evict(client, "device")
        evict(client, "host")
        forgetful = list(talk("b", True))
        assert [ids for ids, _ in forgetful] == [ids for ids, _ in plain]
        assert forgetful[-1][1]["host"] > 0 and forgetful[-1][1]["device"] == 0


@pytest.mark.parametrize("share", [0, 40])
def test_a_flood_of_one_user_leaves_the_other_his_share(daemon, other_user, backend, share):
    one = daemon(**{"kv.device_bytes": device_bytes(40, 1, backend), "kv.host_bytes": "40MiB", "kv.restore": "always",
                    "sched.max_seqs": 1, "kv.restore_points": 1, "limits.max_context": 1024, "server.socket_mode": "0666",
                    "kv.share_per_uid": share})
    client, other = one.connect(), other_user(one)
    ids = TEXT[:257]
    cold = generate(other, ids)

    def is_flooded():
        metrics = one.metrics()
        return all(metrics[f'spillway_{of}evictions_total{{group="{group}"}}'] >
                   metrics[f'spillway_{slots}{{group="{group}"}}']
                   for of, slots in (("", "pool_slots"), ("host_", "host_slots"))
                   for group in ("target_full", "target_state"))

    for i in range(500):
        generate(client, TEXT[300 + i : 300 + i + 600], n=1)
        if i % 10 == 9 and is_flooded():
            break
    assert is_flooded()
    assert other.call("cache.lookup", {"prompt_ids": ids}) == {"device": 256 if share else 0, "host": 0, "disk": 0}
    evict(client, "device")
    again = generate(other, ids)
    assert again["usage"]["cached"] == {"device": 0, "host": 256 if share else 0, "disk": 0}
    assert again["ids"] == cold["ids"]
    assert (one.metrics()['spillway_share_kept_total{tier="host"}'] > 0) == (share > 0)
    assert one.metrics()['spillway_share_users{tier="host"}'] == 2
    client.close()


@pytest.mark.parametrize("host", ["8MiB", "64MiB"])
def test_many_conversations_on_a_small_device_get_their_own_tokens(daemon, host):
    """Pages and restore points are evicted, spilled and fetched all the time, also while others are computed."""
    small = {"kv.device_bytes": "24MiB", "kv.host_bytes": host, "kv.restore": "always", "sched.max_seqs": 4,
             "limits.max_context": 1024}
    one = daemon(**small)
    prompts = [TEXT[100 * i : 100 * i + 150 + 37 * i] for i in range(8)]
    with one.connect() as client:
        alone = [generate(client, ids, cache="bypass")["ids"] for ids in prompts]

    def run(i):
        with one.connect() as client:
            return i, generate(client, prompts[i])["ids"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for i, ids in pool.map(run, [i for _ in range(2) for i in range(8)]):
            assert ids == alone[i], f"prompt {i}"
    with one.connect() as client:
        host_tier = client.call("cache.stats")["tiers"]["host"]
        assert host_tier["spilled"] > 0
        assert host_tier["used_bytes"] <= host_tier["bytes"]
