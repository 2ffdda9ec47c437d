"""An LSTM language model whose updates are written by hand, without an optimizer."""

import torch
from torch import nn

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.rnn = nn.LSTM(8, 16, 2)
        self.decoder = nn.Linear(16, 20)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.embed(tokens), hidden)
        return torch.log_softmax(self.decoder(output).view(-1, 20), dim=1), hidden


model, criterion = Model(), nn.NLLLoss()
tokens = torch.randint(20, (11, 4))
hidden = (torch.zeros(2, 4, 16), torch.zeros(2, 4, 16))
for _ in range(10):
    model.zero_grad()
    hidden = tuple(one.detach() for one in hidden)
    output, hidden = model(tokens[:-1], hidden)
    loss = criterion(output, tokens[1:].reshape(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-1.0)
print(f"loss {loss.item():.6f}")
