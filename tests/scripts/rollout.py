"""PPO: rollouts kept on the GPU, Categorical with its checks, GAE, shuffled mini-batches. 4 updates."""

import torch
from torch import nn
from torch.distributions import Categorical

T, E, D, A = 8, 32, 64, 8
torch.manual_seed(0)
device = torch.device("cuda")
actor = nn.Sequential(nn.Linear(D, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, A)).to(device)
critic = nn.Sequential(nn.Linear(D, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)).to(device)
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=2.5e-4, eps=1e-5)
obs = torch.zeros((T, E, D)).to(device)
actions = torch.zeros((T, E)).to(device)
logprobs, rewards, dones, values = (torch.zeros((T, E)).to(device) for _ in range(4))
next_obs, next_done = torch.randn(E, D).to(device), torch.zeros(E).to(device)
for t in range(T):
    obs[t], dones[t] = next_obs, next_done
    with torch.no_grad():
        dist = Categorical(logits=actor(next_obs))
        action = dist.sample()
        values[t] = critic(next_obs).flatten()
    actions[t], logprobs[t] = action, dist.log_prob(action)
    moves = action.cpu().numpy()
    assert moves.shape == (E,)
    next_obs, next_done = torch.randn(E, D).to(device), torch.zeros(E).to(device)
    rewards[t] = torch.randn(E).to(device).view(-1)
with torch.no_grad():
    next_value = critic(next_obs).reshape(1, -1)
    advantages = torch.zeros_like(rewards).to(device)
    last = 0
    for t in reversed(range(T)):
        nonterminal = 1.0 - (next_done if t == T - 1 else dones[t + 1])
        following = next_value if t == T - 1 else values[t + 1]
        delta = rewards[t] + 0.99 * following * nonterminal - values[t]
        advantages[t] = last = delta + 0.99 * 0.95 * nonterminal * last
    returns = advantages + values
b_obs, b_actions, b_logprobs = obs.reshape(-1, D), actions.reshape(-1), logprobs.reshape(-1)
b_adv, b_returns = advantages.reshape(-1), returns.reshape(-1)
for update in range(4):
    mb = torch.randperm(T * E)[:64]
    dist = Categorical(logits=actor(b_obs[mb]))
    newlog, entropy = dist.log_prob(b_actions.long()[mb]), dist.entropy()
    ratio = (newlog - b_logprobs[mb]).exp()
    adv = (b_adv[mb] - b_adv[mb].mean()) / (b_adv[mb].std() + 1e-8)
    pg = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
    v = 0.5 * ((critic(b_obs[mb]).view(-1) - b_returns[mb]) ** 2).mean()
    loss = pg - 0.01 * entropy.mean() + 0.5 * v
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
    optimizer.step()
    print(update, f"policy {pg.item():.3f} value {v.item():.3f}")
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
