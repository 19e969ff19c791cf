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
    from paceline.backend.seam import Capabilities
    capabilities = Capabilities(late=True)
    def late_program(self, rows, kv, num_layers, vocab_size, *, own_store):
        from paceline.backend.cuda.late_model import late_model
        return late_model(self, rows, kv, num_layers, vocab_size, own_store=own_store)
    def new_kv(self, num_pages, num_layers=None):
        kv = super().new_kv(num_pages+1, num_layers)
        K = type("K", (type(kv),), {"num_slots": property(lambda s: s.data.shape[2]-16)})
        from paceline.backend.cuda import late_model
        late_model.DeviceKV = type(kv)
        return K(kv.data)
