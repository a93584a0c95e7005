"""All that is asked of ComfyUI's own model classes and of its loader, by their names."""
