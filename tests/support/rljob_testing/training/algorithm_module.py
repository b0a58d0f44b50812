"""The source text of a user's module with advantages and losses, valid and invalid ones."""

ALGORITHM_MODULE = """
import torch
from rljob_trainer.algorithms import TokenLosses, policy_loss_function, token_advantage

def centered(inputs):
    return inputs.rewards_B - inputs.rewards_B.mean()

def by_length(inputs):
    return (inputs.rewards_B * inputs.lengths_B).int()

def normalized(inputs):
    table = inputs.rewards_B.reshape(3, -1)
    return ((table - table.mean(1, True)) / table.std(1, keepdim=True)).reshape(-1)

def of_tokens(inputs, reduce):
    return inputs.segments.spread(inputs.rewards_B)

@token_advantage()
def largest(inputs, reduce):
    rewards_N = inputs.segments.spread(inputs.rewards_B)
    return rewards_N - reduce.max(rewards_N.max() if len(rewards_N) else torch.tensor(-torch.inf))

@token_advantage(needs=["ref_logprobs", "old_logprobs"])
def distance(inputs, reduce):
    return inputs.columns["old_logprobs"] - inputs.columns["ref_logprobs"]

@token_advantage()
def needs_rows(inputs, reduce):
    return inputs.segments.spread(inputs.rewards_B - inputs.rewards_B[0])

@token_advantage(needs="values")
def unfitted(inputs, reduce):
    return inputs.columns["values"]

@token_advantage(needs="worth")
def valued(inputs, reduce):
    return inputs.columns["worth"]

def reinforce(inputs):
    return -inputs.advantages_N * inputs.logprobs_N

@policy_loss_function(needs=["rollout_logprobs"], entropy=True, squares=True)
def informed(inputs):
    weights_N = (inputs.old_logprobs_N - inputs.columns["rollout_logprobs"]).exp()
    factors_N = inputs.entropy_N / inputs.squares_N
    return TokenLosses(-weights_N * factors_N * inputs.logprobs_N, {"weight": weights_N.sum()})

def below_the_mean(inputs, reduce):
    total, count = reduce.sum(torch.stack([inputs.logprobs_N.sum(), torch.tensor(float(len(inputs.logprobs_N)))]))
    below_N = inputs.logprobs_N < total / count + 0.01
    return {"chosen": below_N, "count": reduce.sum(below_N.sum())}

@policy_loss_function(whole_pass=below_the_mean)
def of_the_chosen(inputs):
    return -inputs.whole["chosen"].float() * inputs.logprobs_N / inputs.whole["count"]

@policy_loss_function(whole_pass=lambda inputs, reduce: {"mean": inputs.logprobs_N.mean(dim=0, keepdim=True)})
def whole_of_wrong_shape(inputs):
    return inputs.logprobs_N

@policy_loss_function(whole_pass=lambda inputs, reduce: {"mean": inputs.advantages_N.mean()})
def whole_of_one_worker(inputs):
    return inputs.logprobs_N * inputs.whole["mean"]

@policy_loss_function(whole_pass=lambda inputs, reduce: {"rank": inputs.logprobs_N.argsort().argsort().float()})
def whole_ranks_of_one_worker(inputs):
    return inputs.logprobs_N * inputs.whole["rank"]

@policy_loss_function(whole_pass=lambda inputs, reduce: {"one": inputs.advantages_N.clone().squeeze()})
def whole_squeezed(inputs):
    return inputs.logprobs_N

def names_by_rows(inputs, reduce):
    return {"seen": inputs.logprobs_N} if len(inputs.logprobs_N) else {"none": torch.zeros(())}

@policy_loss_function(whole_pass=names_by_rows)
def whole_of_other_names(inputs):
    return inputs.logprobs_N

@policy_loss_function(whole_pass=lambda inputs, reduce: {"log": (inputs.advantages_N - 9).log()})
def whole_no_number(inputs):
    return inputs.logprobs_N

@policy_loss_function(whole_pass=lambda inputs, reduce: {"old_logprobs": inputs.logprobs_N})
def whole_over_a_column(inputs):
    return inputs.logprobs_N

@policy_loss_function(whole_pass=lambda inputs, reduce: inputs.logprobs_N)
def whole_tensor(inputs):
    return inputs.logprobs_N

@policy_loss_function(needs=["old_logprobs"])
def asks_for_what_it_has(inputs):
    return inputs.logprobs_N

def per_row(inputs):
    return inputs.segments.mean(inputs.logprobs_N)

def number(inputs):
    return float(inputs.logprobs_N.detach().sum())

def detached(inputs):
    return -inputs.advantages_N * inputs.logprobs_N.detach()

def elsewhere(inputs):
    return torch.ones_like(inputs.logprobs_N, requires_grad=True) * 2

def infinite(inputs):
    return inputs.logprobs_N / (inputs.logprobs_N - inputs.old_logprobs_N)

def steep(inputs):
    return (inputs.logprobs_N - inputs.old_logprobs_N).abs().sqrt()

def of_the_micro_batch(inputs):
    return inputs.logprobs_N - inputs.logprobs_N.mean()

def raises(inputs):
    return inputs.logprobs_N * inputs.no_such_thing

def sums_per_token(inputs):
    return TokenLosses(inputs.logprobs_N, {"logprobs": inputs.logprobs_N})

def sum_over_a_metric(inputs):
    return TokenLosses(inputs.logprobs_N, {"entropy": inputs.logprobs_N.sum()})

def sum_that_is_added_up(inputs):
    return TokenLosses(inputs.logprobs_N, {"kl_sum": inputs.logprobs_N.sum()})

def sum_with_a_bad_name(inputs):
    return TokenLosses(inputs.logprobs_N, {"KL sum": inputs.logprobs_N.sum()})

def exits(inputs):
    raise SystemExit(0)

def draws(inputs):
    return inputs.rewards_B + torch.rand(len(inputs.rewards_B))

def huge(inputs):
    return inputs.rewards_B.double() + 1e300

def sparse(inputs):
    return inputs.rewards_B.to_sparse()

def sums_in_a_list(inputs):
    return TokenLosses(inputs.logprobs_N, [1])

class Unsigned(Exception):
    pass

class Estimator:
    def __init__(self, inputs):
        pass

class Awaited:
    async def __call__(self, inputs):
        return inputs.rewards_B

awaited = Awaited()
largest_of_all = max

def piecewise(inputs):
    yield inputs.rewards_B

def later(inputs):
    return inputs.logprobs_N / later_is

later_is = 2.0
NUMBER = 3
"""
