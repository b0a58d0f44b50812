"""From pools and roles to the groups of roles that share processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.job_file import load_job_file
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.pools.pool_manager import FusedRoles, plan_roles, pool_settings_of

JOB = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: small}
spec:
  pools: [{name: main, nodes: 2, gpusPerNode: 4}]
  roles: {rollout: {pool: main, tensorParallel: 2}}
  runPolicy: {provisioningDeadlineSeconds: 77}
  training:
    model: {source: some/model}
    dataset: {type: File, file: {path: a.jsonl}, promptField: prompt}
    rewards: [{type: Function, function: {path: "rewards:score"}}]
    steps: 1
    batchSize: 8
"""


def groups(plan_of: dict[str, str | None], *apart: list[str]) -> list[tuple[str, list[str]]]:
    pools = list(dict.fromkeys(str(pool) for pool in plan_of.values()))
    return [(group.pool, list(group.roles)) for group in plan_roles(pools, plan_of, apart).groups]


def test_roles_on_one_pool_share_processes_in_build_order() -> None:
    assert groups({"actor": "main", "ref": "main", "rollout": "main"}) == [("main", ["actor", "ref", "rollout"])]


def test_roles_on_two_pools_are_separate() -> None:
    roles: dict[str, str | None] = {"actor": "left", "critic": "right", "ref": "left", "reward": "right"}
    assert groups(roles) == [("left", ["actor", "ref"]), ("right", ["critic", "reward"])]


def test_some_roles_of_a_pool_can_be_separate() -> None:
    roles: dict[str, str | None] = {"actor": "a", "critic": "b", "ref": "a", "reward": "a", "judge": "a"}
    assert groups(roles, ["reward", "judge"], ["ref"]) == [
        ("a", ["actor"]),
        ("b", ["critic"]),
        ("a", ["ref"]),
        ("a", ["reward", "judge"]),
    ]


def test_a_plan_knows_which_roles_share_processes_and_devices() -> None:
    plan = plan_roles(["a", "b"], {"actor": "a", "rollout": "a", "reward": "a", "critic": "b"}, [["reward"]])
    assert plan.group_of("rollout") == FusedRoles("a", ("actor", "rollout"))
    assert plan.group_of("reward") == FusedRoles("a", ("reward",))
    assert plan.groups_on("a") == [FusedRoles("a", ("actor", "rollout")), FusedRoles("a", ("reward",))]


@pytest.mark.parametrize(
    ("roles", "apart", "message"),
    [
        (
            {"actor": "main", "critic": "small"},
            [],
            r"spec.roles.critic.pool: .*\(seen: small\); name one of spec.pools \(main, more\)",
        ),
        (
            {"actor": "main", "critic": None},
            [],
            r"spec.roles.critic.pool: this role has no pool; name one of spec.pools \(main, more\)",
        ),
        (
            {"actor": "main"},
            [],
            r"spec.pools\[1\].name: no role .*\(seen: more\); remove .*",
        ),
        (
            {"actor": "main", "critic": "more"},
            [["actor", "critic"]],
            r"spec.roles: actor, critic cannot share .*actor main, critic more\).*",
        ),
        (
            {"actor": "main", "critic": "more"},
            [["actor"], ["actor"]],
            r"spec.roles: actor cannot share .*actor main\).*",
        ),
        (
            {"actor": "main", "critic": "more"},
            [["judge"]],
            r"spec.roles: judge cannot share .*judge None\).*",
        ),
    ],
)
def test_errors_name_the_field(roles: dict[str, str | None], apart: list[list[str]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        plan_roles(["main", "more"], roles, apart)


def test_a_role_without_a_pool_is_named() -> None:
    plan = plan_roles(["main"], {"actor": "main", "ref": "main"})
    with pytest.raises(ConfigurationError) as raised:
        plan.group_of("critic")
    assert str(raised.value).startswith("spec.roles.critic.pool: this role has no pool")
    assert "actor, ref" in str(raised.value)


def test_a_jobs_pools_and_roles_are_planned(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    spec = load_job_file(tmp_path / "job.yaml").spec
    assert spec.placed_roles() == {
        "actor": "main",
        "rollout": "main",
        "ref": "main",
        "critic": "main",
        "rewardModel": "main",
    }
    [settings] = pool_settings_of(spec, num_cpus_per_device=1, cluster_resources={"GPU": 8.0, "CPU": 64.0})
    assert (settings.name, settings.num_nodes, settings.num_devices_per_node) == ("main", 2, 4)
    assert (settings.use_gpu, settings.timeout_seconds) == (True, 77)
    assert settings.bundle == {"CPU": 1, "GPU": 1.0}
    [settings] = pool_settings_of(spec, num_cpus_per_device=1, cluster_resources={"CPU": 64.0, "rljob-pool-other": 8.0})
    assert settings.bundle == {"CPU": 1}
    [settings] = pool_settings_of(spec, num_cpus_per_device=1, cluster_resources={"GPU": 8.0, "rljob-pool-main": 8.0})
    assert settings.bundle == {"CPU": 1, "GPU": 1.0, "rljob-pool-main": 1.0}
