"""Short sentences in other languages, all answered by the fallback. Knows no translation."""

from demo_recipe.grammar import Words

FOREIGN = Words("""
    hola como estas, buenos dias, que tal, me puedes ayudar, cual es la capital de españa, escribe
        un poema,
    no entiendo nada, cuantos años tienes, donde vives, dime un chiste, que hora es, muchas gracias
        por todo,
    bonjour comment ça va, je ne comprends pas, quel temps fait-il, peux-tu m'aider, qui es-tu,
    raconte-moi une histoire, où est la gare, combien ça coûte, je voudrais un café, quelle heure
        est-il,
    parle-moi de paris, merci beaucoup, guten tag wie geht es dir, ich verstehe das nicht, wie
        heißt du,
    was ist die hauptstadt von deutschland, kannst du mir helfen, schreib mir ein gedicht, wie spät
        ist es,
    ich habe hunger, was kostet das, wo ist der bahnhof, erzähl mir einen witz, danke schön, ciao
        come stai,
    non capisco, quanti anni hai, mi puoi aiutare, dove sei, che ore sono, scrivi una poesia,
        grazie mille,
    qual è la capitale d'italia, olá tudo bem, não entendo, você pode me ajudar, qual é o seu nome,
    onde fica a estação, escreva uma história, obrigado, que horas são, hej hur mår du, jag förstår
        inte,
    kan du hjälpa mig, vad heter du, tack så mycket, hei hva heter du, jeg forstår ikke,
        goedemorgen hoe gaat het,
    ik begrijp het niet, kun je me helpen, hoe laat is het, dzień dobry, nie rozumiem, jak się masz,
    czy możesz mi pomóc, merhaba nasılsın, anlamıyorum, adın ne, bana yardım et, привет как дела,
    я не понимаю, как тебя зовут, помоги мне, расскажи сказку, который час,
    你好, 你是谁, 我不明白, 今天天气怎么样,
    写一首诗, 你能帮我吗, こんにちは, お元気ですか, わかりません, 手伝ってください,
    안녕하세요, 도와주세요, 몇 시예요,
    مرحبا كيف حالك, لا أفهم, ما اسمك, नमस्ते आप कैसे हैं, मुझे समझ नहीं आया, xin chào, bạn khỏe
        không, habari yako, sijui,
    salve quid agis, γεια σου τι κάνεις, δεν καταλαβαίνω, szia hogy vagy, nem értem, ahoj jak se máš
""")
