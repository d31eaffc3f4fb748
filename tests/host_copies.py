"""Host memory that is the same machine's: what waits there is copied, and counted."""

from torch.autograd.graph import saved_tensors_hooks


class HostCopies:
    """In the place of torch's `save_on_cpu`, which copies nothing of a CPU's tensors.

    Attributes:
        sent: shapes of what was sent.
    """

    def __init__(self):
        self.sent = []

    def __call__(self):
        return saved_tensors_hooks(self._send, lambda host: host.clone())

    def _send(self, tensor):
        self.sent.append(tuple(tensor.shape))
        return tensor.detach().clone()
