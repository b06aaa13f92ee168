# `python scripts/homebrew_formula.py VERSION`, on a Mac, fills in url, sha256 and resources for a release on PyPI.
class MlxServe < Formula
  include Language::Python::Virtualenv

  desc "Local OpenAI-compatible LLM server with paged continuous batching"
  homepage "https://pypi.org/project/mlx-server/"
  url "https://files.pythonhosted.org/packages/00/00/000000000000000000000000000000000000000000000000000000000000/mlx_server-0.2.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.12"

  def install
    # MLX and some others are on PyPI as compiled wheels only, which Homebrew does not install by itself.
    compiled = resources.select { |resource| resource.url.end_with?("arm64.whl", "universal2.whl") }
    venv = virtualenv_install_with_resources without: compiled.map(&:name)
    compiled.each do |resource|
      resource.stage { venv.pip_install Pathname.pwd.glob("*.whl").first }
    end
  end

  service do
    run [opt_bin/"mlx-serve", "serve"]
    keep_alive successful_exit: false
    process_type :interactive
    log_path var/"log/mlx-serve.log"
    error_log_path var/"log/mlx-serve.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlx-serve --version")
    (testpath/"wrong.toml").write <<~TOML
      [server]
      port = "none"
    TOML
    assert_match "port", shell_output("#{bin}/mlx-serve config check wrong.toml 2>&1", 2)
    system libexec/"bin/python", "-c", "import mlx.core, mlx_server"
  end
end
