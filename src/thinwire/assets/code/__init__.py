"""What packed assets of any kind are coded with: symbols."""
