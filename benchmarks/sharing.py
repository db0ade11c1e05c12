"""What parallel sampling and beam search save by sharing KV blocks, on the default model.

Prints blocks held against blocks that unshared sequences would hold, over the life of each
request, and its wall time. `--words` sets the length of the prompt.
"""

import argparse
import time

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.events import GroupFinished
from engine.model.default_model import find_default_model
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from engine.sequence import BeamSearch, SamplingParams, TenantShare

TEXT = "the mill stands by the river and the miller opens the gate in the morning "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=64, help="of output, for each sequence")
    arguments = parser.parse_args()
    model = load_model(find_default_model())
    cache = CacheConfig(num_blocks=512)
    config = EngineConfig(
        cache=cache, scheduler=SchedulerConfig(max_step_tokens=128, max_seqs=16, max_model_len=4096)
    )
    words = TEXT.split() * (1 + arguments.words // 15)
    text = " ".join(words[: arguments.words])
    prompt = tuple(model.tokenizer.encode(text))
    common = {"max_tokens": arguments.tokens, "ignore_eos": True}
    requests = {
        "n = 2": SamplingParams(n=2, **common),
        "n = 4": SamplingParams(n=4, **common),
        "n = 8": SamplingParams(n=8, **common),
        "beam width 4": SamplingParams(beam=BeamSearch(width=4), **common),
    }
    print(f"prompt {len(prompt)} tokens, {arguments.tokens} of output, blocks of 16")
    print(f"{'request':14}{'unshared':>10}{'held':>8}{'saved':>8}{'seconds':>9}")
    for name, params in requests.items():
        core = EngineCore(config, ModelRunner(model, cache), clock=time.monotonic)
        core.add("r", prompt, params, share=TenantShare(tenant="a"), namespace="a")
        started = time.perf_counter()
        groups = []
        while core.has_work:
            groups += [event for event in core.step() if isinstance(event, GroupFinished)]
        seconds = time.perf_counter() - started
        (group,) = groups
        steps = arguments.tokens
        unshared, held = group.unshared_block_steps / steps, group.block_steps / steps
        print(f"{name:14}{unshared:10.1f}{held:8.1f}{1 - held / unshared:8.1%}{seconds:9.1f}")


if __name__ == "__main__":
    main()
