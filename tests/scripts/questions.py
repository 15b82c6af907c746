"""What a script may ask of its GPU."""

import torch

torch.cuda.memory._record_memory_history(max_entries=1000)
x = torch.ones(1000, 1000, device="cuda")
y = x @ x
del x
print("name", torch.cuda.get_device_name(), torch.cuda.get_device_name(0))
print("capability", torch.cuda.get_device_capability())
print("count", torch.cuda.device_count(), torch.cuda.is_available(), torch.cuda.current_device())
print("total", torch.cuda.get_device_properties(0).total_memory)
print("allocated", torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(0))
print("reserved", torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved("cuda"))
free, total = torch.cuda.mem_get_info()
print("free", free, total)
stats = torch.cuda.memory_stats()
print("stats", stats["allocated_bytes.all.current"], stats["num_ooms"], stats["segment.all.current"])
print(torch.cuda.memory_summary(abbreviated=True).splitlines()[1])
snapshot = torch.cuda.memory._snapshot()
print("snapshot", len(snapshot["segments"]), len(snapshot["device_traces"][0]) > 0)
print("list", len(torch.cuda.memory_snapshot()))
torch.cuda.reset_peak_memory_stats()
torch.cuda.empty_cache()
torch.cuda.synchronize()
torch.cuda.set_per_process_memory_fraction(0.5)
print("after", torch.cuda.memory_reserved(), torch.cuda.get_per_process_memory_fraction())
print("bf16", torch.cuda.is_bf16_supported())
torch.cuda.memory._dump_snapshot("snapshot.pickle")
torch.cuda.memory._record_memory_history(enabled=None)
