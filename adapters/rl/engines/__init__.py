"""Engines that sample answers token by token: the built-in one, completion servers, a pool."""
