"""A pass that a hook of another pass begins: the loss of a large batch, its gradients computed in small pieces."""

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x, y, factor = torch.randn(64, 8), torch.randn(64, 8), torch.ones(8, requires_grad=True)


def embedded(pieces):
    with torch.no_grad():
        return [model(piece).requires_grad_() for piece in pieces]


def in_pieces(pieces, embeddings):
    """Return a hook that computes the gradients of the model from those of the embeddings, piece by piece."""

    @torch.enable_grad()
    def hook(gradient):
        for piece, embedding in zip(pieces, embeddings, strict=True):
            again = model(piece)
            assert torch.equal(again, embedding)
            (again.flatten() @ (gradient * embedding.grad).flatten()).backward()
        ((model(x) * factor).mean() * 1e-3).backward()
        (asked,) = torch.autograd.grad(model[0](x).mean(), model[0].bias)
        (inner,) = torch.autograd.grad(model(embeddings[0]).sum(), embeddings[0])
        print(f"asked {asked.norm().item():.6f} {inner.norm().item():.6f}")
        for given in (None, torch.full((), 3.0)):
            (asked,) = torch.autograd.grad(get_gradient_edge(model[0](x).mean()), model[0].bias, given)
            print(f"from an edge {asked.norm().item():.6f}")

    return hook


for _ in range(5):
    pieces = [*x.split(16), *y.split(16)]
    embeddings = embedded(pieces)
    first, second = torch.cat(embeddings[:4]), torch.cat(embeddings[4:])
    loss = nn.functional.cross_entropy(first @ second.t(), torch.arange(64))
    loss.backward()
    cached = loss.detach().requires_grad_()
    cached.register_hook(in_pieces(pieces, embeddings))
    optimizer.zero_grad()
    (cached * 1).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e3)
    optimizer.step()
    print(f"norm {norm.item():.6f} {1e3 * factor.grad.norm().item():.6f}")
    factor.grad = None
print(f"loss {loss.item():.6f}")
