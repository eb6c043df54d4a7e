"""Write the pictures that the documentation shows: the live view of a training, and every view of the dashboard.

`live.svg` is a recorded `agl demo`. For the dashboard, two short trainings of the demo's calculator agent and a prompt
optimisation on the simulated model fill one store, which is served and looked at in Chromium. `--store` keeps that
store, and uses one that is there.
"""

import argparse
import asyncio
import json
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
ASSETS: Final = ROOT / "docs" / "assets"
TARGET: Final = ASSETS / "dashboard"
LIVE: Final = ASSETS / "live.svg"
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "calc_x")]

from live_picture import write_live_picture  # noqa: E402 # beside this file
from small_png import shrunk  # noqa: E402 # beside this file

from agentlightning.store import LightningStoreServer, SqliteLightningStore  # noqa: E402 # found by the line above
from tests.dashboard.browser import Page, chromium_path, open_page, running_browser  # noqa: E402 # as above

TRAININGS: Final = ({"steps": 12, "group_size": 8, "seed": 0}, {"steps": 12, "group_size": 4, "seed": 1})
WIDTH, HEIGHT, NARROW = 1100, 800, 400
MOST_HEIGHT: Final = 1250
MOST_BYTES: Final = 150_000
MOST_BYTES_TOGETHER: Final = 1_000_000
QUIET: Final = "document.getElementById('state').textContent === 'live' && !document.querySelector('[aria-busy=true]')"


def train(file: Path, steps: int, group_size: int, seed: int) -> None:
    """One training of the calculator agent."""
    import calc_agent
    import tasks

    from agentlightning.algorithm.grpo import GRPO
    from agentlightning.trainer import Trainer

    Trainer(
        algorithm=GRPO("tiny", steps=steps, group_size=group_size, tasks_per_step=10, validate_every=4, seed=seed),
        store=f"sqlite:///{file}",
        n_runners=1,
        strategy={"type": "cs", "server_port": 0},
        runner={"type": "agentlightning.LitAgentRunner", "max_concurrency": 24},
        name=f"calculator-{group_size}",
    ).fit(
        calc_agent.solve,
        train_dataset=tasks.tasks(2000, held_out=False, seed=seed),
        val_dataset=tasks.tasks(64, held_out=True),
    )


def optimise(file: Path) -> None:
    """One optimisation of the prompt of the room selector."""
    program = ROOT / "examples" / "apo_room_selector" / "optimise.py"
    sys.argv = [str(program), "--offline", "--store", str(file)]
    sys.path.insert(0, str(program.parent))
    runpy.run_path(str(program), run_name="__main__")


def fill(file: Path) -> None:
    """Each training in a process of its own, as a user would start it."""
    for options in (None, *TRAININGS):
        command = [sys.executable, __file__, "--store", str(file), "--fill", json.dumps(options)]
        subprocess.run(command, check=True)


async def views(store: SqliteLightningStore) -> dict[str, str]:
    """The address of every view, by the name of its picture."""
    runs = {run.name: run.run_id for run in await store.query_runs()}
    trained = [run_id for name, run_id in runs.items() if name.startswith("calculator")]
    of_step = await store.query_rollouts(run_id_in=[trained[0]], step_in=[5], mode_in=["train"])
    groups: dict[str, set[float | None]] = {}
    for rollout in of_step:
        groups.setdefault(rollout.metadata["group"] if rollout.metadata else "", set()).add(rollout.reward)
    group = next(name for name, rewards in groups.items() if len(rewards) > 1)
    rollout_id = next(one.rollout_id for one in of_step if (one.metadata or {}).get("group") == group)
    resources = await store.query_resources(sort_by="create_time", limit=6)
    return {
        "overview": "",
        "runs": f"/runs?ids={','.join(trained)}&smooth=0.5",
        "run": f"/runs/{trained[0]}",
        "steps": f"/runs/{trained[0]}?step=6&group={group}",
        "prompts": f"/runs/{runs['apo']}",
        "rollouts": "/rollouts?mode=train&sort=reward&order=asc&step=6",
        "rollout": f"/rollouts/{rollout_id}",
        "tokens": f"/rollouts/{rollout_id}",
        "resources": f"/resources/{resources[-1].resources_id}",
        "workers": "/workers",
    }


SCROLLED: Final = {"steps": "Steps", "prompts": "Prompts, each below the one it came from", "tokens": "Tokens"}
"""Views of which only what begins with this panel is shown."""


async def show(page: Page, address: str, width: int) -> None:
    await page.send(
        "Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=1, mobile=width == NARROW
    )
    await page.goto("about:blank")
    await page.goto(address)
    await page.until(QUIET)
    await asyncio.sleep(0.7)  # until answers have come in


async def take(page: Page, name: str, address: str, *, width: int = WIDTH) -> Path:
    """One picture, as long as the view is, and no longer than one wants to read."""
    await show(page, address, width)
    top = 0
    if name in SCROLLED:
        heading = json.dumps(SCROLLED[name].upper())
        found = f"[...document.querySelectorAll('h2')].find(one => one.innerText.toUpperCase() === {heading})"
        await page.until(found)
        top = int(await page.ask(f"{found}.closest('.panel').getBoundingClientRect().top + scrollY - 70"))
    height = int(await page.ask("Math.ceil(document.querySelector('main').getBoundingClientRect().bottom + scrollY)"))
    clip = {"x": 0, "y": top, "width": width, "height": max(300, min(MOST_HEIGHT, height - top)), "scale": 1}
    file = TARGET / f"{name}.png"
    await page.picture(file, clip=clip)
    await asyncio.to_thread(file.write_bytes, shrunk(await asyncio.to_thread(file.read_bytes)))
    return file


async def pictures(file: Path) -> list[Path]:
    taken = []
    store = SqliteLightningStore(file)
    server = LightningStoreServer(store, "127.0.0.1", 0, launch_mode="asyncio")
    await server.start()
    try:
        with tempfile.TemporaryDirectory() as folder, running_browser(Path(folder)) as devtools:
            async with open_page(devtools) as page:
                base = f"{server.endpoint}/dashboard#"
                addresses = await views(store)
                for name, path in addresses.items():
                    taken.append(await take(page, name, base + path))
                taken.append(await take(page, "narrow", base + addresses["run"], width=NARROW))
                dark: Any = [{"name": "prefers-color-scheme", "value": "dark"}]
                await page.send("Emulation.setEmulatedMedia", features=dark)
                taken.append(await take(page, "dark", base))
    finally:
        await server.stop()
        await store.close()
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, help="keep the store in this file, and use what it holds")
    parser.add_argument("--live", action="store_true", help="write the picture of the live view alone")
    parser.add_argument("--fill", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fill is not None:
        socket.gethostname = lambda: "machine"  # which workers are named after, and the pictures show
        settings = json.loads(options.fill)
        optimise(options.store) if settings is None else train(options.store, **settings)
        return 0
    if options.live:
        write_live_picture(LIVE)
        return 0
    if chromium_path() is None:
        print("There is no Chromium; install it with `make browser`.", file=sys.stderr)
        return 1
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        file = options.store or Path(folder) / "runs.db"
        if not file.exists():
            fill(file)
        taken = asyncio.run(pictures(file))
    write_live_picture(LIVE)
    taken.append(LIVE)
    sizes = {picture.name: picture.stat().st_size for picture in taken}
    for name, size in sizes.items():
        print(f"{name:18} {size / 1000:6.0f} kB")
    too_large = [name for name, size in sizes.items() if size > MOST_BYTES]
    if too_large or sum(sizes.values()) > MOST_BYTES_TOGETHER:
        print(f"Too large: {', '.join(too_large) or 'all together'}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
