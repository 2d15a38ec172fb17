//! Preloaded into QEMU: turns one shared mapping private (ARCHITECTURE.md, the memory recipe).
