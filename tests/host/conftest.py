from cpu_executor import calls_go_to_the_oracle

__all__ = ["calls_go_to_the_oracle"]
