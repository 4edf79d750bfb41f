"""Operations of readers; rebuilds lost blocks."""
