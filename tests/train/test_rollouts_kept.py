"""rollouts.json: what the model learned from, for people to read."""

import json

from qlora_rl.report import write_report


def test_a_group_of_the_first_and_of_the_newest_step_is_kept_with_its_rewards(make_trainer, config):
    seen = []

    def second_group(completions, **_):
        """The first group has equal rewards, so it teaches nothing."""
        seen.append(list(completions))
        return [0.5, 0.5, *(float(i) for i in range(len(completions) - 2))]

    trainer = make_trainer(args=config(max_steps=2), reward_funcs=second_group)
    trainer.train()
    kept = json.loads((trainer.run.path / "rollouts.json").read_text())
    assert [kept["first"]["step"], kept["last"]["step"]] == [1, 2]
    for when, completions in (("first", seen[0]), ("last", seen[-1])):
        told = [(each["completion"], each["rewards"]) for each in kept[when]["rollouts"]]
        assert told == [(completions[2], {"second_group": 0.0}), (completions[3], {"second_group": 1.0})]
    assert "Rollouts: what it learned from" in write_report(trainer.run.path).read_text()


def test_groups_of_steps_between_are_kept_evenly_and_those_that_are_done_again_are_not_twice_there(
    make_trainer, config
):
    trainer = make_trainer(args=config(max_steps=30, save_strategy="steps", save_steps=20))
    trainer.train()
    file = trainer.run.path / "rollouts.json"
    kept = json.loads(file.read_text())
    assert [each["step"] for each in kept["steps"]] == [4, 7, 10, 13, 16, 19, 22, 25, 28]
    assert all({"step", "prompt", "rollouts"} <= each.keys() for each in kept["steps"])
    page = write_report(trainer.run.path).read_text()
    assert all(f">{name} (" in page for name in ("First step", "Step", "Newest step"))
    again = make_trainer(args=config(max_steps=30, save_strategy="steps", save_steps=20), existing_run="continue")
    again.train(resume_from_checkpoint=str(trainer.run.path / "checkpoint-20"))
    assert [each["step"] for each in json.loads(file.read_text())["steps"]] == [4, 7, 10, 13, 16, 19, 22, 25, 28]


def test_a_run_that_goes_on_keeps_its_first_rollouts(make_trainer, config):
    first = make_trainer()
    first.train()
    before = json.loads((first.run.path / "rollouts.json").read_text())["first"]
    make_trainer(existing_run="continue").train()
    assert json.loads((first.run.path / "rollouts.json").read_text())["first"] == before
    make_trainer(existing_run="overwrite").train()
    kept = json.loads((first.run.path / "rollouts.json").read_text())
    assert kept["first"] == kept["last"]
