"""Operations of workers that write: acquire, seal, abandon."""
