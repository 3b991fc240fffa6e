from modelopt_eagle.cli.main import run_script

run_script("quantize_drafter")
