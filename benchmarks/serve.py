"""Start a server of its own in a new home and measure it: `make bench`.

Every argument goes to `headrace bench serve`; without any, its defaults apply. The server takes its
HEADRACE_* settings from the environment.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile

HEADRACE = [sys.executable, "-c", "from gateway.cli import main; main(prog_name='headrace')"]


def main() -> int:
    """The benchmark's exit code."""
    with tempfile.TemporaryDirectory() as home:
        server = subprocess.Popen(
            [*HEADRACE, "up", "--port", "0", "--json"],
            env={**os.environ, "HEADRACE_HOME": home},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line:
                return server.wait() or 1  # it has said why on stderr
            ready = json.loads(line)
            target = ["--base-url", ready["base_url"], "--model", ready["model"]]
            return subprocess.run(
                [*HEADRACE, "bench", "serve", *target, *sys.argv[1:]],
                env={**os.environ, "HEADRACE_API_KEY": ready["api_key"]},
                check=False,
            ).returncode
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
