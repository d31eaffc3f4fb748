"""A device of which copies are made as late as they may be."""

import weakref

import torch


class LateCopier:
    """The CPU as a device: no copy is made before somebody waits for it, or for a later one."""

    device = "cpu"

    def __init__(self):
        self.queue, self.sent, self.log = [], [], []

    def send(self, tensor):
        host = torch.full_like(tensor, torch.nan)
        self.queue.append((host, weakref.ref(tensor)))
        self.sent.append(host)
        self.log.append(("send", len(self.sent) - 1))
        return host, len(self.queue)

    def fetch(self, host):
        tensor = torch.full_like(host, torch.nan)
        self.queue.append((tensor, weakref.ref(host)))
        self.log.append(("fetch", next(i for i, each in enumerate(self.sent) if each is host)))
        return tensor, len(self.queue)

    def wait(self, event):
        for i in range(event):
            if self.queue[i] is not None:
                to, source = self.queue[i]
                assert source() is not None, "given back before its copy was made"
                to.copy_(source())
                self.queue[i] = None
