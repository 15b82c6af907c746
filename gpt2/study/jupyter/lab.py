"""The Jupyter that runs the notebooks: this interpreter, and nothing written outside the folder it is given.

`python -m gpt2.study.jupyter.lab` opens JupyterLab on the notebooks; further words go to JupyterLab.
"""

import json
import os
import sys
from pathlib import Path

from ipykernel.kernelspec import get_kernel_dict
from traitlets.config import Config

from gpt2.study import paths

# Other users of the machine must not read along.
CONFIG = Config({"KernelManager": {"transport_encryption": "auto"}})
OPTIONS = [
    "--KernelManager.transport_encryption=auto",
    "--ServerApp.kernel_websocket_connection_class=gpt2.study.jupyter.connection.Prompt",
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
]


def variables(home: Path) -> dict[str, str]:
    """The variables that keep Jupyter, IPython, matplotlib and downloads inside `home`, and let kernels find us."""
    inside = {
        "IPYTHONDIR": "ipython",
        "JUPYTER_CONFIG_DIR": "jupyter/config",
        "JUPYTER_DATA_DIR": "jupyter/data",
        "JUPYTER_PATH": "jupyter/share",
        "JUPYTER_RUNTIME_DIR": "jupyter/runtime",
        "JUPYTERLAB_SETTINGS_DIR": "jupyter/lab/settings",
        "JUPYTERLAB_WORKSPACES_DIR": "jupyter/lab/workspaces",
        "MPLCONFIGDIR": "matplotlib",
        "XDG_CACHE_HOME": "cache",
        "HF_HOME": "cache/huggingface",
    }
    fixed = {
        "HF_HUB_OFFLINE": "1",
        "JUPYTER_PLATFORM_DIRS": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(paths.ROOT),
    }
    return fixed | {name: str(home / folder) for name, folder in inside.items()}


def prepare(home: Path) -> dict[str, str]:
    """Write what Jupyter needs into `home`, and return the variables of a process that is to use it.

    The kernel `python3` is this interpreter, whatever else is installed, and JupyterLab does not ask the network for
    news.
    """
    chosen = variables(home)
    spec = get_kernel_dict(["--log-level=CRITICAL"]) | {"display_name": "Python 3"}
    paths.write(Path(chosen["JUPYTER_PATH"]) / "kernels" / "python3" / "kernel.json", json.dumps(spec).encode())
    settings = Path(chosen["JUPYTERLAB_SETTINGS_DIR"]) / "@jupyterlab" / "apputils-extension"
    if not settings.exists():
        quiet = {"fetchNews": "false", "checkForUpdates": False}
        paths.write(settings / "notification.jupyterlab-settings", json.dumps(quiet).encode())
    return chosen


def main() -> None:
    """Become JupyterLab."""
    os.environ.update(prepare(paths.state()))
    options = [f"--ServerApp.root_dir={paths.ROOT}", "--LabApp.default_url=/lab/tree/notebooks", *OPTIONS]
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *options, *sys.argv[1:]])


if __name__ == "__main__":
    main()
