"""As much of aiohttp as the fake ComfyUI and the launcher need. A server of our own, since it must be able to break every rule."""
