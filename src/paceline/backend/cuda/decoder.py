import torch
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.seam import Packed
class CudaDecoder(ReferenceDecoder):
    name="cuda"
    def forward(self, d, kv, *, num_layers=None, taps=()):
        if isinstance(d, Packed):
            return super().forward(d,kv,num_layers=num_layers,taps=taps)
        n=int(d.cu_len[-1]); T=len(d.token_ids)
        p=Packed(d.token_ids[:n].numpy(),d.positions[:n].numpy(),d.slots[:n].numpy(),d.cu_len.numpy(),d.pages.numpy(),d.wanted.numpy())
        h,t=super().forward(p,kv,num_layers=num_layers,taps=taps)
        return h,{k:v.numpy() for k,v in t.items()}
