"""Heavy libraries are imported where they are used, not at import of the package."""

from __future__ import annotations

import subprocess
import sys

LIGHT_MODULES = (
    *(
        "datasets.cursor",
        "models.source",
        "datasets.prompts",
        "datasets.rows",
        "source_paths",
    ),
    *("rewards.loading", "rewards.process_pool", "rewards.scoring_program"),
    *("environments.environment_pool", "environments.environment_program", "environments.probe"),
)
HEAVY_LIBRARIES = "torch transformers datasets pyarrow reasoning_gym math_verify sympy huggingface_hub ray vllm"


def test_importing_data_rewards_and_environments_imports_no_heavy_library() -> None:
    imports = "\n".join(f"import rljob_trainer.{module}" for module in LIGHT_MODULES)
    program = f"{imports}\nimport sys\nprint(sorted(set({HEAVY_LIBRARIES.split()!r}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
