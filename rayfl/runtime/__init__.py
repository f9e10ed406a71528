"""Ray's room: driver (GPS), local parameter servers, client actors, checkpoints; the inline backend."""
