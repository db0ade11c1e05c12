"""The inference engine: scheduling, KV memory, the model. Knows nothing of HTTP, SQL or keys.

service -> core -> scheduling -> memory -> plan -> sequence -> config | events -> errors, and
model -> kernels, the only places that import torch. Import from the submodules: this file stays
empty so that importing the scheduler costs no torch.
"""
