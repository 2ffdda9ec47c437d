"""Writes every kind of file that holds a model, its optimizer or a copy of them; with "open", opens them without lowp.

After word_language_model of pytorch/examples, which saves the whole model and loads it again.
"""

import copy
import math
import pickle
import sys

import torch
from torch import nn

if opens := sys.argv[1:] == ["open"]:
    sys.modules["lowp"] = None  # importing it raises ImportError


class Model(nn.Transformer):
    def __init__(self):
        super().__init__(16, 2, dim_feedforward=32, num_encoder_layers=1, num_decoder_layers=1, dropout=0.0)
        self.embed = nn.Embedding(20, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        mask = torch.triu(torch.full((len(tokens), len(tokens)), -1e9), 1)
        x = self.encoder(self.embed(tokens) * math.sqrt(16), mask=mask, is_causal=False)
        return torch.log_softmax(self.head(self.norm(x.flatten(0, 1)).view_as(x)), -1)


def seen(module, *gradients):
    if not module.training:
        raise AssertionError(gradients)


def write(model, optimizer, average):
    whole = {"model": model, "copy": copy.deepcopy(model), "average": average, "optimizer": optimizer}
    torch.save(model, "model.pt")
    torch.save(model, "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({name: one.state_dict() for name, one in whole.items()}, "states.pt")
    with open("whole.pkl", "wb") as file:
        pickle.dump(copy.deepcopy(whole), file)
    torch.export.save(torch.export.export(copy.deepcopy(model), (tokens[:-1],)), "exported.pt2")
    for one in model.modules():  # TorchScript refuses modules that have some
        one._backward_hooks.clear(), one._backward_pre_hooks.clear()
    torch.jit.trace(model, tokens[:-1], check_trace=False).save("traced.ts")
    torch.jit.script(model.norm).save("scripted.ts")


torch.manual_seed(0)
tokens = torch.randint(20, (12, 4))
torch.manual_seed(0)
if not opens:
    model = Model()
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        getattr(model.head, register)(seen)
    model.norm.register_backward_hook(seen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.nll_loss(model(tokens[:-1]).flatten(0, 1), tokens[1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        average.update_parameters(model)
    write(model.eval(), optimizer, average)
model = torch.load("model.pt", weights_only=False)
legacy = torch.load("legacy.pt", weights_only=False)
states = torch.load("states.pt", weights_only=True)
with open("whole.pkl", "rb") as file:
    whole = pickle.load(file)
fresh = Model().eval()
fresh.load_state_dict(states["model"])
exported = torch.export.load("exported.pt2").module()
models = (model, legacy, whole["model"], whole["copy"], fresh, exported, torch.jit.load("traced.ts"))
if opens:
    outputs = [one(tokens[:-1]) for one in models]
    assert all(torch.allclose(one, outputs[0], atol=1e-5) for one in outputs)
    assert torch.equal(torch.jit.load("scripted.ts")(torch.ones(2, 16)), model.norm(torch.ones(2, 16)))
    assert all(value.dtype in (torch.float32, torch.int64) for value in states["model"].values())
    whole["model"].train()(tokens[:-1]).sum().backward()
    whole["optimizer"].step()
    nn.Module.load_state_dict(model, states["copy"])
    print("opened", len(outputs))
