from modelopt_eagle.__main__ import run_script

if __name__ == "__main__":
    run_script("synthesize_answers")
