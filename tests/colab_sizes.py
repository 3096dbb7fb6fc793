"Sizes for tests of the six notebooks that exist only in colab/, where a cell contains those of a reader: text in a cell, and what a test runs instead."

SHORT = {
    "figures": {
        'figures = "all"': 'figures = "5e"',
        "quick = False": "quick = True",
        'folder = "runs/figures"': 'folder = __import__("tempfile").mkdtemp()',
        "measured(names)": "measured(names, repeats=1, worlds=64, steps=4)",
        "n = sizes.middle": "n = 64",
        "for case in cases for row in measure(case, peers(),": "for case in cases[:1] for row in measure(case, peers()[:1],"},
    "standalone_ppo": {"Config() if small": "Config(num_envs=16, num_steps=16, total_steps=2048, hidden=16) if small"},
    "standalone_rl2": {
        "Config() if small": "Config(num_envs=32, steps_per_task=48, steps_per_update=24, total_steps=6144, hidden=16) if small",
        "num_trials = 10": "num_trials = 3",
        "number, length = 0, 60": "number, length = 0, 24"},
    "train_grpo_llm": {"range(64)": "range(16)", "small_steps = 12": "small_steps = 2"},
    "train_rl2_gpu": (training := {
        "folder = run_folder(name, mount_drive)": 'folder = __import__("tempfile").mkdtemp() + "/rl2"',
        "config_for(device, out=": "config_for(device, fast=True, out=",
        "held_out=unseen, num_tasks=256": "held_out=unseen, num_tasks=16",
        'num_tasks=256 if device.platform == "cpu" else 4096, num_trials=10': "num_tasks=16, num_trials=3"}),
    "train_rl2_tpu": training}


def shortened(name: str, source: str) -> str:
    "The source of a cell of colab/NAME.ipynb with the sizes of a test."
    for long, short in SHORT.get(name, {}).items():
        source = source.replace(long, short)
    return source
